"""The safetensors files of a Hugging Face folder: one file, or shards with an index. Reads headers, no weight; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_core.errors import CheckpointError
from llama_core.files.json_fields import read_object, refuse_faults
from llama_core.files.text_files import fault_of
from llama_core.model.fields import shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TIED = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
_SUFFIX = ".safetensors"
_OTHER = ("consolidated", "adapter_")  # Mistral's own format, and LoRA
_MAX_HEADER_BYTES = 16 * 2**20  # of 100,000 tensors; the library takes seconds for the 100 MB that it allows


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor in a file. dtype: its name in the format, such as BF16."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def is_weights_file(name: str) -> bool:
    """Whether a file of this name in the folder may hold weights of the model."""
    return name.endswith(_SUFFIX) and not name.startswith(_OTHER)


def find_weights(directory: Path) -> dict[str, Located]:
    """Every tensor of the folder by its name there. Raises CheckpointError that names the file at fault."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory", param="ckpt_dir")
    if (directory / INDEX).exists():
        return _indexed(directory)
    return {each.name: each for each in read_header(_single(directory))}


def open_file(path: Path, framework: str) -> Any:
    """A file that the library has mapped, with tensors of "numpy" or "pt" (torch). Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open  # not on machines that only measure GPUs

    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > _MAX_HEADER_BYTES:
            what = f"its header has {num_bytes} bytes, more than {_MAX_HEADER_BYTES}: damaged, or not safetensors"
            raise CheckpointError(f"{path}: {fault_of(path, what)}")
        return safe_open(path, framework=framework)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged, cut short, or not safetensors: {str(error)[:200]}") from None


def read_header(path: Path) -> list[Located]:
    """Every tensor of a safetensors file. Raises CheckpointError that names it."""
    with open_file(path, "numpy") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return [Located(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()]


def _single(directory: Path) -> Path:
    if (directory / SINGLE).exists():
        return directory / SINGLE
    others = sorted(file.name for file in directory.iterdir() if is_weights_file(file.name))
    if others:
        raise CheckpointError(f"{directory / INDEX}: no such file, but {shown(others[0])} needs it", param="ckpt_dir")
    remedy = ""
    if next(directory.glob("pytorch_model*.bin"), None) is not None:
        remedy = "; pytorch_model.bin is not read: save_pretrained of transformers writes safetensors"
    raise CheckpointError(f"{directory}: no {SINGLE} in it, and no {INDEX}{remedy}", param="ckpt_dir")


def _indexed(directory: Path) -> dict[str, Located]:
    index = directory / INDEX
    files = _weight_map(index)
    if (directory / SINGLE).exists() and SINGLE not in files.values():
        raise CheckpointError(f"{index}: does not name {SINGLE}, which lies beside it: remove one of the two")
    located: dict[str, Located] = {}
    for file in sorted(set(files.values())):
        for each in read_header(directory / file):
            if each.name in located:
                raise CheckpointError(f"{each.file}: {shown(each.name)} is in {located[each.name].file.name} too")
            located[each.name] = each
    refuse_faults(str(index), _contradictions(files, located))
    return located


def _weight_map(index: Path) -> dict[str, str]:
    """The name of the file of each weight, which lies in the index's folder."""
    files = read_object(index, refusal=CheckpointError).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: field 'weight_map' must be an object with the file of each weight")
    for name in files.values():
        if not isinstance(name, str) or not name.endswith(_SUFFIX):
            raise CheckpointError(f"{index}: {shown(name)} is not the name of a safetensors file")
        if "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(f"{index}: {shown(name)} lies outside the index's folder")
        if not _exists(index.parent / name):
            raise CheckpointError(f"{index.parent}: {shown(name)}, which {index.name} names, is missing")
    return files


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or no text
        return False


def _contradictions(files: Mapping[str, str], located: Mapping[str, Located]) -> Sequence[str]:
    """Weights that are not where the index says. `weights/hf.py` finds a missing half of a pair that is not tied."""
    faults = []
    for name, file in files.items():
        if name not in located:
            if name not in _TIED:
                faults.append(f"{shown(name)} is not in {file}")
        elif located[name].file.name != file:
            faults.append(f"{shown(name)} is in {located[name].file.name}, not in {file}")
    return faults + [
        f"{shown(name)} in {at.file.name} is not in the index" for name, at in located.items() if name not in files
    ]
