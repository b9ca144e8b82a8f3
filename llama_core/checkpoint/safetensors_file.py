"""The header of a safetensors file: the names, dtypes, shapes and places of its tensors. Reads no tensor and needs no torch.

A file is 8 bytes with the header's length, the header as a JSON object, and the tensors' bytes, in this order. Every claim of a
header is checked against the file, so that no reader ever follows an offset out of it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llama_core.checkpoint.json_fields import shown
from llama_core.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LENGTH_BYTES = 8
_MAX_SIZE = 2**63 - 1

ITEM_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dtype: its name in the format, a key of ITEM_BITS. begin, end: bytes of the file, half open."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file by name. Raises CheckpointError that names the file and the tensor at fault."""
    text, size = _header_text(path)
    header = _parse(path, text)
    data_begin = _LENGTH_BYTES + len(text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ in its header is not an object of strings")
    tensors = {name: _tensor(path, name, entry, data_begin, size) for name, entry in header.items()}
    _check_layout(path, tensors, data_begin, size)
    return tensors


def _header_text(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and the size of the file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes, more than {MAX_HEADER_BYTES}: damaged, or not safetensors"
                )
            if size < _LENGTH_BYTES + length:
                raise CheckpointError(f"{path}: cut short: has {size} bytes, its header alone {length}")
            return file.read(length), size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: its header names {shown(twice)} twice")
        return entries

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
        raise CheckpointError(f"{path}: its header is not JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object")
    return header


def _tensor(path: Path, name: str, entry: object, data_begin: int, size: int) -> StoredTensor:
    where = f"{path}: {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: its entry in the header is not of the fields dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise CheckpointError(f"{where}: unknown dtype {shown(dtype)}")
    shape = _naturals(where, "shape", entry["shape"])
    offsets = _naturals(where, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1] or data_begin + offsets[1] > size:
        raise CheckpointError(
            f"{where}: data_offsets {shown(list(offsets))} lie outside the file: damaged or cut short"
        )
    num_bits = math.prod(shape) * ITEM_BITS[dtype]
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{where}: shape {shown(list(shape))} of dtype {dtype} does not have {offsets[1] - offsets[0]} bytes"
        )
    return StoredTensor(dtype, shape, data_begin + offsets[0], data_begin + offsets[1])


def _naturals(where: str, field: str, value: object) -> tuple[int, ...]:
    is_list = isinstance(value, list) and len(value) <= 64
    if not is_list or any(type(each) is not int or not 0 <= each <= _MAX_SIZE for each in value):  # type: ignore[attr-defined]
        raise CheckpointError(f"{where}: {field} is {shown(value)}, expected a list of integers of at least 0")
    assert isinstance(value, list)
    return tuple(value)


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], data_begin: int, size: int) -> None:
    """Raises CheckpointError unless the tensors fill the file, one after the other."""
    at = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            what = "overlaps another tensor" if tensor.begin < at else "does not begin where another tensor ends"
            raise CheckpointError(f"{path}: {shown(name)} {what}")
        at = tensor.end
    if at != size:
        raise CheckpointError(f"{path}: has {size - at} bytes after its last tensor")
