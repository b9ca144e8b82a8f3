"""The weights in Meta's shards. Reads shards through memory maps, a slice at a time, and unpickles nothing but tensors.

The numbers of shards and ranks are independent: shards divide every weight into equal parts along one dimension, and a rank's
part consists of pieces of any number of shards.
"""

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from llama_core.errors import CheckpointError
from llama_core.files.json_fields import refuse_faults
from llama_core.files.source import Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.weights import EMBEDDING, OUTPUT, Box, WeightSpec, weight_specs
from llama_core.weights.mapped import file_begin, release, row_chunks

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DERIVED = re.compile(r"rope\.freqs$")


class MetaWeights(WeightReader):
    """Mapped shards whose names and shapes have been checked against the architecture. Allocates no memory for weights."""

    def __init__(self, directory: Path, paths: Sequence[Path], config: ModelConfig) -> None:
        """`paths`: the shards in order. Raises CheckpointError that names the file, and the first five weights at fault."""
        self._paths = paths
        self._is_tied = config.tied_embeddings
        self._specs = weight_specs(config)
        self._shards = [_map_shard(path) for path in paths]
        for shard in self._shards:
            if config.tied_embeddings and EMBEDDING in shard:
                shard.setdefault(OUTPUT, shard[EMBEDDING])
        self._shard_dims = {name: self._check_weight(name, spec) for name, spec in self._specs.items()}
        faults = [fault for fault in self._shard_dims.values() if isinstance(fault, str)]
        for path, shard in zip(paths, self._shards, strict=True):
            unexpected = [name for name in shard if name not in self._specs and not _DERIVED.search(name)]
            faults += [f"{name} is unexpected in {path.name}" for name in unexpected]
        refuse_faults(f"{directory}: weights do not fit params.json", faults)
        self._check_replicas()
        # torch swaps the bytes of big-endian files where it maps them.
        self._begins = [
            None if _is_big_endian(path) else file_begin(shard[OUTPUT])
            for path, shard in zip(paths, self._shards, strict=True)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights as stored."""
        return self._shards[0][OUTPUT].dtype

    def verify_checksums(self, index: int, count: int) -> None:
        """Compare the bytes of every `count`-th shard, from `index`, with the CRC-32 that its archive states for them."""
        for path in self._paths[index::count]:
            try:
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
            except (OSError, zipfile.BadZipFile, EOFError) as error:
                raise CheckpointError(f"{path}: damaged: {error}") from None
            if damaged is not None:
                raise CheckpointError(f"{path}: damaged: record {damaged!r} does not match its checksum")

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        """Rows of the mapped shards. Releases the pages of a slice when the next slice is requested."""
        for path, offset, stored, shard_begin in self._stored(name):
            # This shard holds [offset, offset + stored.shape) of the full weight; the rank wants `box` of it.
            begin = [max(o, wanted) for o, wanted in zip(offset, box.start, strict=True)]
            ends = zip(offset, stored.shape, box.start, box.shape, strict=True)
            end = [min(o + size, wanted + count) for o, size, wanted, count in ends]
            if any(e <= b for b, e in zip(begin, end, strict=True)):
                continue
            piece = stored[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offset, strict=True))]
            first, *others = (b - wanted for b, wanted in zip(begin, box.start, strict=True))
            for row, end_row in row_chunks(piece):
                rows = piece[row:end_row]
                yield Slice(
                    path, rows, (first + row, *others), None if shard_begin is None else rows.data_ptr() - shard_begin
                )
                release(piece[row:end_row])

    def _stored(self, name: str) -> Iterator[tuple[Path, tuple[int, ...], torch.Tensor, int | None]]:
        """(shard, first index of its tensor in the full weight, its tensor, address of the shard's first byte) of each shard
        that the weight needs."""
        shard_dim = self._shard_dims[name]
        assert not isinstance(shard_dim, str)
        for index, (path, shard) in enumerate(zip(self._paths, self._shards, strict=True)):
            tensor = shard[name]
            first = tuple(index * size if dim == shard_dim else 0 for dim, size in enumerate(tensor.shape))
            yield path, first, tensor, self._begins[index]
            if shard_dim is None:
                return

    def _check_weight(self, name: str, spec: WeightSpec) -> int | None | str:
        """The dimension along which the shards divide this weight, None if each has all of it; or its fault, as text."""
        count = len(self._shards)
        for path, shard in zip(self._paths, self._shards, strict=True):
            if name not in shard:
                return f"{name} is missing from {path.name}"
        shapes = [tuple(shard[name].shape) for shard in self._shards]
        shard_dims = _known_shard_dims(name, spec, self._is_tied)
        if count == 1 or not shard_dims:
            candidates: list[tuple[int | None, tuple[int, ...]]] = [(None, spec.shape)]
        else:
            candidates = [
                (dim, tuple(size // count if d == dim else size for d, size in enumerate(spec.shape)))
                for dim in shard_dims
                if spec.shape[dim] % count == 0
            ]
        for dim, expected in candidates:
            if all(shape == expected for shape in shapes):
                return dim
        wanted = " or ".join(str(list(expected)) for _, expected in candidates) or f"a part of {list(spec.shape)}"
        at_fault = next((i for i, shape in enumerate(shapes) if all(shape != e for _, e in candidates)), 0)
        return f"{name} has shape {list(shapes[at_fault])} in {self._paths[at_fault].name}, expected {wanted}"

    def _check_replicas(self) -> None:
        """Raises CheckpointError if norms differ between shards: then the shards are of different checkpoints."""
        for path, shard in zip(self._paths[1:], self._shards[1:], strict=True):
            if not torch.equal(shard["norm.weight"], self._shards[0]["norm.weight"]):
                raise CheckpointError(
                    f"{path}: norm.weight differs from {self._paths[0].name}: shards of different checkpoints"
                )


def _known_shard_dims(name: str, spec: WeightSpec, is_tied: bool) -> tuple[int, ...]:
    """The dimensions along which checkpoints divide the weight: Llama 2's first. Llama 3 divides the embedding by rows."""
    if spec.rank_dim is None:
        return ()
    return (1, 0) if name == EMBEDDING or (name == OUTPUT and is_tied) else (spec.rank_dim,)


def _is_big_endian(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        records = [name for name in archive.namelist() if name.endswith("/byteorder")]
        return any(archive.read(name) == b"big" for name in records)


def _map_shard(path: Path) -> dict[str, torch.Tensor]:
    try:
        shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged or hostile file can make the unpickler raise anything
        raise CheckpointError(f"{path}: not a checkpoint that can be loaded safely: {type(error).__name__}") from None
    if not isinstance(shard, dict):
        raise CheckpointError(f"{path}: holds a {type(shard).__name__}, expected a dict of weights")
    for name, weight in shard.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a name of a weight is a {type(name).__name__}, expected a string")
        if not isinstance(weight, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(weight).__name__}, expected a weight")
        plain = weight.layout is torch.strided and weight.device.type == "cpu" and not weight.is_quantized
        if not plain or weight.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: {name} is not a plain bfloat16, float16 or float32 tensor ({weight.dtype})")
    return shard
