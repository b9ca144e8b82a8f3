"""Reads the header of a GGUF file: the metadata, and where each tensor lies. Reads no weight and needs no torch.

The file is untrusted: every count, length and offset is compared with the size of the file before it is used, and arrays
are decoded only when they are asked for. Layout: "GGUF", version, counts, metadata, tensor descriptions, padding, tensors.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from llama_core.errors import CheckpointError
from llama_core.files.gguf.types import ENCODINGS, Encoding, encoding_name
from llama_core.files.text_files import fault_of
from llama_core.model.fields import shown

Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = "general.alignment", 32, 2**16
# Far above what models have: a vocabulary has 10**5 tokens and 10**6 merges, a model 10**4 tensors.
_MAX_KEYS, _MAX_TENSORS, _MAX_ELEMENTS, _MAX_STRINGS = 2**16, 2**18, 2**24, 2**21
_MAX_NAME_BYTES, _MAX_STRING_BYTES, _MAX_HEADER_BYTES = 2**16, 2**24, 2**28
_MAX_DIMS = 4


class GgufTensor(NamedTuple):
    """shape: the slowest dimension first, as in torch. offset: of its first byte in `file`."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.encoding.values * self.encoding.num_bytes


class _Array(NamedTuple):
    """An array of the metadata that has not been decoded. at: of its first element in the file."""

    kind: int
    length: int
    at: int


class Metadata(Mapping[str, Value]):
    """The metadata of one file. Decodes an array each time it is asked for; raises CheckpointError for text that is not UTF-8.

    Arrays are lists. Text, numbers and truth values are Python's.
    """

    def __init__(self, reader: "_Reader", values: dict[str, "bool | int | float | str | _Array"]) -> None:
        self._reader = reader
        self._values = values

    def __getitem__(self, key: str) -> Value:
        value = self._values[key]
        return self._reader.elements(value, key) if isinstance(value, _Array) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file. False for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class GgufFile:
    """The header of one file. `tensors`: by name, in the file's order."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError that names the file and what is wrong with its header."""
        self.path = path
        reader = _Reader(path)
        num_tensors, num_keys = reader.counts()
        self.metadata = Metadata(reader, _read_metadata(reader, num_keys))
        self.tensors = _read_tensors(reader, num_tensors, _alignment(self.metadata, reader))


class _Reader:
    """A position in a mapped file, and checked reads there."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # what mmap raises for an empty file
            raise CheckpointError(f"{path}: not a GGUF file: it is empty") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}", param="ckpt_dir") from None
        self.path = path
        self.size = len(self.data)
        self.at = 0
        self._num_strings = 0  # of all arrays

    def fault(self, what: str) -> CheckpointError:
        what = f"damaged, or not a GGUF file that can be read: {what}"
        return CheckpointError(f"{self.path}: {fault_of(self.path, what)}")

    def counts(self) -> tuple[int, int]:
        """Numbers of tensors and of metadata keys, after the magic and the version."""
        if self.data[:4] != _MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file: it does not begin with {_MAGIC.decode()}")
        self.at = 4
        version = self.u32()
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path}: is a big-endian GGUF file; only little-endian files are supported")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.path}: has GGUF version {version}; versions 2 and 3 are supported")
        num_tensors, num_keys = self.u64(), self.u64()
        for what, count, most in (("tensors", num_tensors, _MAX_TENSORS), ("metadata keys", num_keys, _MAX_KEYS)):
            if count > most:
                raise self.fault(f"it states {count} {what}, more than {most}")
        return num_tensors, num_keys

    def skip(self, num_bytes: int) -> int:
        """Advance. Returns the position before."""
        begin, self.at = self.at, self.at + num_bytes
        if self.at > self.size:
            raise self.fault("it ends inside its header")
        if self.at > _MAX_HEADER_BYTES:
            raise self.fault(f"its header has more than {_MAX_HEADER_BYTES} bytes")
        return begin

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8))[0])

    def text(self, what: str, most: int) -> str:
        length = self.u64()
        if length > most:
            raise self.fault(f"{what} has {length} bytes, more than {most}")
        begin = self.skip(length)
        return self._decode(begin, length, what)

    def _decode(self, begin: int, length: int, what: str) -> str:
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def scalar(self, kind: int) -> bool | int | float:
        code = struct.Struct(f"<{_SCALARS[kind]}")
        value: bool | int | float = code.unpack_from(self.data, self.skip(code.size))[0]
        return value

    def array(self, key: str) -> _Array:
        """Skip an array, after a check of its extent."""
        kind, count = self.u32(), self.u64()
        if kind != _STRING and kind not in _SCALARS:
            raise self.fault(f"{key} is an array of type {kind}, which is unknown")
        if count > _MAX_ELEMENTS:
            raise self.fault(f"{key} has {count} elements, more than {_MAX_ELEMENTS}")
        array = _Array(kind, count, self.at)
        self._num_strings += count if kind == _STRING else 0
        if self._num_strings > _MAX_STRINGS:
            raise self.fault(f"its arrays have more than {_MAX_STRINGS} strings, with {key}")
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        else:
            for begin, length in self._strings(array):
                self.at = begin + length
        return array

    def _strings(self, array: _Array) -> Iterator[tuple[int, int]]:
        """(first byte, length) of each string."""
        at, end, unpack = array.at, min(self.size, _MAX_HEADER_BYTES), _U64.unpack_from
        for _ in range(array.length):
            length = unpack(self.data, at)[0] if at + 8 <= end else end
            if at + 8 + length > end:
                raise self.fault("it ends inside its header")
            yield at + 8, length
            at += 8 + length

    def elements(self, array: _Array, key: str) -> Value:
        """Decode an array."""
        if array.kind == _STRING:
            return [self._decode(begin, length, f"an element of {key}") for begin, length in self._strings(array)]
        return list(struct.unpack_from(f"<{array.length}{_SCALARS[array.kind]}", self.data, array.at))


def _read_metadata(reader: _Reader, count: int) -> dict[str, bool | int | float | str | _Array]:
    values: dict[str, bool | int | float | str | _Array] = {}
    for _ in range(count):
        key = reader.text("a metadata key", _MAX_NAME_BYTES)
        if key in values:
            raise reader.fault(f"the metadata key {shown(key)} is there twice")
        kind = reader.u32()
        if kind == _STRING:
            values[key] = reader.text(shown(key), _MAX_STRING_BYTES)
        elif kind == _ARRAY:
            values[key] = reader.array(shown(key))
        elif kind in _SCALARS:
            values[key] = reader.scalar(kind)
        else:
            raise reader.fault(f"the metadata key {shown(key)} has type {kind}, which is unknown")
    return values


def _alignment(metadata: Metadata, reader: _Reader) -> int:
    alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.fault(f"{_ALIGNMENT_KEY} must be a power of two, at most {_MAX_ALIGNMENT}")
    return alignment


def _read_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        tensor = _read_tensor(reader)
        if tensor.name in tensors:
            raise reader.fault(f"the tensor {shown(tensor.name)} is there twice")
        tensors[tensor.name] = tensor
    begin = -(-reader.at // alignment) * alignment
    placed = {name: tensor._replace(offset=begin + tensor.offset) for name, tensor in tensors.items()}
    _check_places(reader, placed, begin, alignment)
    return placed


def _read_tensor(reader: _Reader) -> GgufTensor:
    """One description. The offset counts from the end of the header."""
    name = reader.text("the name of a tensor", _MAX_NAME_BYTES)
    num_dims = reader.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise reader.fault(f"the tensor {shown(name)} has {num_dims} dimensions")
    shape = tuple(reader.u64() for _ in range(num_dims))[::-1]
    number, offset = reader.u32(), reader.u64()
    encoding = ENCODINGS.get(number)
    if encoding is None:
        known = ", ".join(each.name for each in ENCODINGS.values())
        raise CheckpointError(
            f"{reader.path}: the tensor {shown(name)} has the encoding {encoding_name(number)}, which is not "
            f"supported; supported are {known}"
        )
    if min(shape) < 1 or shape[-1] % encoding.values:
        raise reader.fault(f"the tensor {shown(name)} has the shape {list(shape)} in {encoding.name}")
    return GgufTensor(name, shape, encoding, reader.path, offset)


def _check_places(reader: _Reader, tensors: dict[str, GgufTensor], begin: int, alignment: int) -> None:
    """Raises CheckpointError for a tensor that lies outside the file, on another one, or off the alignment."""
    end = begin
    for tensor in sorted(tensors.values(), key=lambda each: each.offset):
        if (tensor.offset - begin) % alignment:
            raise reader.fault(f"the tensor {shown(tensor.name)} is not aligned to {alignment} bytes")
        if tensor.offset < end:
            raise reader.fault(f"the tensor {shown(tensor.name)} overlaps another one")
        end = tensor.offset + tensor.num_bytes
        if end > reader.size:
            raise reader.fault(f"the tensor {shown(tensor.name)} lies outside the file of {reader.size} bytes")
