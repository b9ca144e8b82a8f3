"""Writes the weights of Hugging Face's format: safetensors files with their index, dense or packed, a weight at a time."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from llama_core.checkpoint.hf_files import INDEX, SINGLE
from llama_core.checkpoint.hf_packed import pack, part_names
from llama_core.checkpoint.hf_quantization import FORMATS
from llama_core.checkpoint.hf_weights import hugging_face_name, is_rotated
from llama_core.checkpoint.loader import Progress
from llama_core.checkpoint.source import DENSE, GROUP, WeightReader
from llama_core.checkpoint.weights import OUTPUT, Box, WeightSpec, weight_specs
from llama_core.model_config import ModelConfig

_NAMES: Final = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
}
_BITS: Final = {name: bits for bits, name in FORMATS.items()}


class _Tensor(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(
    reader: WeightReader,
    model: ModelConfig,
    dtype: torch.dtype,
    folder: Path,
    num_files: int,
    on_progress: Progress,
    packs: bool = False,
) -> list[Path]:
    """Write every weight to so many files, one weight in memory at a time. Returns the files, the index last.

    dtype: of dense weights. packs: those that `reader` stores as "int4" or "int8_groups" are packed, with scales in float16,
    which holds them exactly; else they are expanded.
    """
    specs = {n: spec for n, spec in weight_specs(model).items() if n != OUTPUT or not model.tied_embeddings}
    stored = {name: reader.stored_format(name) if packs else DENSE for name in specs}
    tensors = {name: _tensors(name, spec, dtype, stored[name]) for name, spec in specs.items()}
    sizes = {name: sum(each.num_bytes for each in parts) for name, parts in tensors.items()}
    total = sum(sizes.values())
    groups = _groups(sizes, num_files)
    names = [SINGLE] if len(groups) == 1 else [
        f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)
    ]  # fmt: skip
    done = 0
    for file, group in zip(names, groups, strict=True):
        with (folder / file).open("wb") as out:
            header, places = _header([each for name in group for each in tensors[name]])
            out.write(header)
            for name in group:
                values = _values(reader, name, specs[name], dtype, stored[name], model.head_dim)
                for tensor, part in zip(tensors[name], values, strict=True):
                    assert part.nbytes == tensor.num_bytes
                    out.seek(len(header) + places[tensor.name])
                    out.write(part.reshape(-1).view(torch.uint8).numpy().data)
                done += sizes[name]
                on_progress(done, total)
    files = [folder / name for name in names]
    if len(files) > 1:
        weight_map = {
            each.name: file
            for file, group in zip(names, groups, strict=True)
            for name in group
            for each in tensors[name]
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        files.append(folder / INDEX)
    return files


def _tensors(name: str, spec: WeightSpec, dtype: torch.dtype, stored: str) -> list[_Tensor]:
    """The tensors of a weight in the file, in the order of `_values`."""
    own = hugging_face_name(name)
    if stored not in _BITS:
        return [_Tensor(own, dtype, spec.shape)]
    parts = part_names(own)
    rows, columns = spec.shape
    return [
        _Tensor(parts["packed"], torch.int32, (rows, columns * _BITS[stored] // 32)),
        _Tensor(parts["scale"], torch.float16, (rows, columns // GROUP)),
        _Tensor(parts["shape"], torch.int64, (2,)),
    ]


def _values(
    reader: WeightReader, name: str, spec: WeightSpec, dtype: torch.dtype, stored: str, head_dim: int
) -> Iterator[torch.Tensor]:
    """The contents of the weight's tensors, with the rows of q and k in Hugging Face's order."""
    order = head_dim if is_rotated(name) else None
    box = Box((0,) * len(spec.shape), spec.shape)
    if stored not in _BITS:
        weight = torch.empty(spec.shape, dtype=dtype)
        for _, values, start, _ in reader.slices(name, box):
            weight[_region(start, values.shape)].copy_(values)
        yield _in_halves(weight, order)
        return
    rows, columns = spec.shape
    packed = torch.empty((rows, columns * _BITS[stored] // 8), dtype=torch.uint8)
    scales = torch.empty((rows, columns // GROUP), dtype=torch.float16)
    for piece in reader.grouped_slices(name, box):
        some = pack(piece.codes, _BITS[stored])
        row, column = piece.start
        packed[_region((row, column * _BITS[stored] // 8), some.shape)] = some
        scales[_region((row, column // GROUP), piece.scales.shape)] = piece.scales.half()
    yield _in_halves(packed, order)
    yield _in_halves(scales, order)
    yield torch.tensor(spec.shape)


def _region(start: Sequence[int], shape: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))


def _in_halves(weight: torch.Tensor, head_dim: int | None) -> torch.Tensor:
    """Heads in Hugging Face's order: values (2i, 2i + 1) of each head become (i, i + head_dim / 2). As it is without heads."""
    if head_dim is None:
        return weight
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _groups(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The weights of each file, in order, with about the same number of bytes; none is empty."""
    count = min(count, len(sizes))
    groups: list[list[str]] = [[] for _ in range(count)]
    begun, left = 0, len(sizes)
    total = sum(sizes.values())
    index = 0
    for name, size in sizes.items():
        is_full = begun >= total * (index + 1) / count or left == count - 1 - index
        if groups[index] and is_full and index + 1 < count:
            index += 1
        groups[index].append(name)
        begun += size
        left -= 1
    return groups


def _header(tensors: Sequence[_Tensor]) -> tuple[bytes, dict[str, int]]:
    """The length and the header of a safetensors file, padded to whole 8 bytes, and the place of each tensor behind it.

    Tensors with the largest items come first, so that every one is aligned.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    at = 0
    for tensor in sorted(tensors, key=lambda each: -each.dtype.itemsize):
        places[tensor.name] = at
        end = at + tensor.num_bytes
        entries[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places
