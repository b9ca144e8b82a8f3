"""The weights in a GGUF file. Reads rows and columns through memory maps, a slice at a time, and decodes their blocks.

The gguf package decodes the encodings that are not here.
"""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from llama_core.errors import CheckpointError
from llama_core.files.gguf.config import ROPE_TENSORS, GgufKeys
from llama_core.files.gguf.file import GgufTensor
from llama_core.files.gguf.model import GgufModel
from llama_core.files.gguf.types import Encoding
from llama_core.files.json_fields import refuse_faults
from llama_core.files.source import DENSE, GroupedSlice, Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.fields import shown
from llama_core.model.weight_formats import CODINGS
from llama_core.model.weights import EMBEDDING, OUTPUT, Box, WeightSpec, weight_specs
from llama_core.weights.gguf_blocks import STORED, groups
from llama_core.weights.hf import interleaved
from llama_core.weights.loader import dense
from llama_core.weights.mapped import release

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain_dtype(encoding: Encoding) -> torch.dtype | None:
    """The dtype of an encoding without blocks, None for the others."""
    return _PLAIN.get(encoding.name)


def decode(encoding: Encoding, stored: torch.Tensor) -> torch.Tensor:
    """stored: uint8 [rows, bytes] of whole blocks -> [rows, columns], float32 unless the encoding is a plain dtype."""
    dtype = plain_dtype(encoding)
    if dtype is not None:
        return stored.clone(memory_format=torch.contiguous_format).view(dtype)  # a file may hold it at any byte
    if encoding.name in STORED:
        return dense(groups(encoding.name, encoding.num_bytes, stored), CODINGS[STORED[encoding.name].coding])
    import gguf  # takes 0.3 s, which files of other encodings need not wait for

    kind = gguf.GGMLQuantizationType[encoding.name]
    return torch.from_numpy(gguf.quants.dequantize(stored.contiguous().numpy(), kind))


_CHUNK_VALUES = 2**20  # of one slice: 4 MB as float32


class GgufWeights(WeightReader):
    """Mapped files whose names and shapes have been checked against the architecture. Allocates no memory for weights."""

    def __init__(self, model: GgufModel, config: ModelConfig) -> None:
        """Raises CheckpointError that names the file, and the first five weights at fault."""
        self._model = model
        self._head_dim = config.head_dim
        self._rotated = config.rope.rotated(config.head_dim)
        self._halves = GgufKeys(model).family(model.path).gguf_is_neox
        self._specs = weight_specs(config)
        self._tensors = _checked_tensors(model, self._specs, config)
        self._mapped: Mapping[Path, torch.Tensor] = {
            path: _map(path) for path in {tensor.file for tensor in self._tensors.values()}
        }

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 if a linear layer's weights are quantized; else the dtype of the first linear layer."""
        dtypes = [plain_dtype(tensor.encoding) for name, tensor in self._tensors.items() if self._specs[name].is_linear]
        return torch.bfloat16 if None in dtypes else dtypes[0] or torch.bfloat16

    def stored_format(self, name: str) -> str:
        encoding = self._tensors[name].encoding
        if encoding.name in STORED:
            return STORED[encoding.name].coding
        return encoding.name if plain_dtype(encoding) is None else DENSE

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            for first, stored in self._stored(name, Box((*box.start, 0), (*box.shape, 1))):
                factors, offset = decode(tensor.encoding, stored).flatten(), self._specs[name].offset
                yield Slice(tensor.file, factors - offset if offset else factors, (first,))
            return
        whole, inside = self._whole_blocks(tensor, box)
        for first, stored in self._stored(name, whole):
            yield Slice(tensor.file, decode(tensor.encoding, stored)[:, inside], (first, 0))

    def grouped_slices(self, name: str, box: Box, coding: str) -> Iterator[GroupedSlice]:
        """Codes of a block may be a box's in part: groups of a k-quant are smaller than its blocks."""
        tensor, group = self._tensors[name], CODINGS[coding].group
        if tensor.encoding.name not in STORED:
            raise LookupError(f"{name} is not stored as {coding}")
        whole, inside = self._whole_blocks(tensor, box)
        of_groups = slice(inside.start // group, inside.stop // group)
        for first, stored in self._stored(name, whole):
            codes, scales, minima = groups(tensor.encoding.name, tensor.encoding.num_bytes, stored)
            minima = None if minima is None else minima[:, of_groups]
            yield GroupedSlice(tensor.file, codes[:, inside], scales[:, of_groups], minima, (first, 0))

    @staticmethod
    def _whole_blocks(tensor: GgufTensor, box: Box) -> tuple[Box, slice]:
        """The box with whole blocks of columns, and the columns of `box` in it."""
        unit, begin = tensor.encoding.values, box.start[1]
        blocks = range(begin // unit, -(-(begin + box.shape[1]) // unit))
        whole = Box((box.start[0], blocks.start * unit), (box.shape[0], len(blocks) * unit))
        return whole, slice(begin - blocks.start * unit, begin - blocks.start * unit + box.shape[1])

    def _stored(self, name: str, box: Box) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row of the box, bytes of the next rows), uint8 [rows, bytes]; the columns of the box are whole blocks.

        Releases the pages of the rows when the next ones are requested.
        """
        tensor = self._tensors[name]
        values, num_bytes = tensor.encoding.values, tensor.encoding.num_bytes
        everything = self._mapped[tensor.file][tensor.offset : tensor.offset + tensor.num_bytes].view(
            tensor.shape[0], -1
        )
        columns = slice(box.start[1] // values * num_bytes, (box.start[1] + box.shape[1]) // values * num_bytes)
        needs_order = self._halves and self._specs[name].is_rotated
        step = max(1, _CHUNK_VALUES // max(1, box.shape[1]))
        if needs_order:
            step = max(1, step // self._head_dim) * self._head_dim  # whole heads
        first = box.start[0] + self._specs[name].first_row
        begin, end = first, first + box.shape[0]
        while begin < end:
            stop = min(end, begin - begin % step + step)
            rows = everything[begin:stop]
            yield begin - first, (interleaved(rows, self._head_dim, self._rotated) if needs_order else rows)[:, columns]
            release(everything[begin:stop])
            begin = stop


def _checked_tensors(model: GgufModel, specs: Mapping[str, WeightSpec], config: ModelConfig) -> dict[str, GgufTensor]:
    """The tensor of every weight of the architecture, by our name."""
    found, faults = {}, []
    left = dict(model.tensors)
    for name in ROPE_TENSORS:
        left.pop(name, None)
    for name, spec in specs.items():
        own = specs[EMBEDDING if name == OUTPUT and config.tied_embeddings else name].gguf
        tensor = model.tensors.get(own)
        left.pop(own, None)
        if tensor is None:
            faults.append(f"{own} is missing")
            continue
        if spec.expert is not None and tensor.shape == (config.n_experts, *spec.stored_shape):
            tensor = _part_of(tensor, spec.expert)
        if (1, *tensor.shape) == spec.shape:  # as converters of 2024 write a matrix of one row
            tensor = tensor._replace(shape=spec.shape)
        if tensor.shape != spec.stored_shape:
            faults.append(f"{own} has shape {list(tensor.shape)}, expected {list(spec.stored_shape)}")
        if len(spec.shape) == 1 and plain_dtype(tensor.encoding) is None:
            faults.append(f"{own} is encoded as {tensor.encoding.name}, expected F32")
        found[name] = tensor
    faults += [f"{shown(name)} is unexpected" for name in left]
    refuse_faults(f"{model.path}: weights do not fit the metadata", faults)
    return found


def _part_of(tensor: GgufTensor, expert: int) -> GgufTensor:
    offset = tensor.offset + expert * tensor.num_bytes // tensor.shape[0]
    return tensor._replace(shape=tensor.shape[1:], offset=offset)


def _map(path: Path) -> torch.Tensor:
    """The bytes of the file, uint8."""
    try:
        with path.open("rb") as file:
            # Copy-on-write, which torch asks of memory; nothing is ever written to it.
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
