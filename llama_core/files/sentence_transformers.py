"""Reads what sentence-transformers' files beside the weights say of embeddings: modules.json, and the pooling's config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llama_core.errors import CheckpointError
from llama_core.files.json_fields import read_object

MODULES: Final = "modules.json"
FILES: Final = (MODULES, "1_Pooling/config.json")
_MAX_BYTES: Final = 2**20
_FLAG: Final = "pooling_mode_"
_NAMES: Final = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last", "cls": "first", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """How a model embeds a text. pooling: mean, last or first. normalize: to length 1. dim: of a vector, 0 if unknown. fault:
    what its files ask for that is not served; "" for nothing."""

    pooling: str = "last"
    normalize: bool = True
    dim: int = 0
    fault: str = ""


def read_embedding_form(folder: Path, dim: int) -> EmbeddingForm:
    """The default, which is vLLM's for generating models, where there is no modules.json. Raises CheckpointError that names a
    file which cannot be read."""
    path = folder / MODULES
    if not path.is_file():
        return EmbeddingForm(dim=dim)
    try:
        modules = {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in _read_list(path)}
    except (KeyError, TypeError):
        raise CheckpointError(f"{path}: must be a list of modules, each with type and path") from None
    normalize = "Normalize" in modules
    if others := sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"}):
        return EmbeddingForm(normalize=normalize, dim=dim, fault=f"{MODULES} has {others[0]}")
    config = folder / Path(modules.get("Pooling", "")).name / "config.json"
    if "Pooling" not in modules or not config.is_file():
        return EmbeddingForm(normalize=normalize, dim=dim, fault="the config.json of a Pooling module is missing")
    modes = _modes(read_object(config, _MAX_BYTES, CheckpointError))
    if len(modes) == 1 and modes[0] in _NAMES:
        return EmbeddingForm(_NAMES[modes[0]], normalize, dim)
    return EmbeddingForm(normalize=normalize, dim=dim, fault=f"its pooling is {' and '.join(modes)[:80] or 'none'}")


def _read_list(path: Path) -> list[Any]:
    try:
        modules = json.loads(path.read_bytes()[:_MAX_BYTES])
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {str(error)[:200]}") from None
    if not isinstance(modules, list):
        raise TypeError
    return modules


def _modes(config: dict[str, Any]) -> list[str]:
    """The names of the pooling modes: of a flag each, or one by its name as later versions write it."""
    flags = [name.removeprefix(_FLAG) for name, value in config.items() if name.startswith(_FLAG) and value is True]
    if not flags and "pooling_mode" in config:
        return [str(config["pooling_mode"])]
    return flags
