"""Reads a model's generation_config.json and config.json: ids that end an answer, and recommended sampling parameters."""

from pathlib import Path
from typing import Any, Final, NamedTuple

from llama_core.errors import CheckpointError
from llama_core.files.json_fields import read_object

_MAX_BYTES: Final = 2**22
_MAX_ID: Final = 2**31 - 1


FILES: Final = ("generation_config.json", "config.json")


class RecommendedSampling(NamedTuple):
    """None where the model recommends nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_stop_ids(folder: Path) -> frozenset[int]:
    """The ids called eos_token_id in both files, as far as they exist. Raises CheckpointError that names the file."""
    paths = [folder / name for name in FILES]
    return frozenset().union(*(_ids(_read(path).get("eos_token_id"), path) for path in paths))


def read_recommended_sampling(folder: Path) -> RecommendedSampling:
    """The sampling parameters in generation_config.json; none for a path that is no folder. Raises CheckpointError that names
    the file and the field."""
    path = folder / FILES[0]
    content = _read(path)
    penalty = _number(content, "repetition_penalty", path, 1e-6, 10)
    if content.get("do_sample") is False:
        return RecommendedSampling(temperature=0.0, repetition_penalty=penalty)
    top_k = _number(content, "top_k", path, -_MAX_ID, _MAX_ID)
    return RecommendedSampling(
        _number(content, "temperature", path, 0, 1e4),
        _number(content, "top_p", path, 0, 1),
        None if top_k is None else max(0, int(top_k)),  # -1 means no limit, as 0
        _number(content, "min_p", path, 0, 1),
        penalty,
    )


def generation_files(folder: Path) -> list[Path]:
    """Those of the files that exist."""
    return [path for name in FILES if (path := folder / name).is_file()]


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, _MAX_BYTES, CheckpointError) if path.is_file() else {}


def _ids(value: object, path: Path) -> frozenset[int]:
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id > _MAX_ID:
            raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them")
    return frozenset(token_id for token_id in ids if token_id >= 0)  # -1 means none


def _number(content: dict[str, Any], name: str, path: Path, low: float, high: float) -> float | None:
    value = content.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(f"{path}: {name} must be a number from {low:g} to {high:g}")
    return value
