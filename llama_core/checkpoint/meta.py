"""Meta's checkpoints: which shards there are, whether they are whole, and one rank's share of them.

Shards and ranks are independent: every weight is cut along one dimension into equal parts, so a rank's part is made of
pieces of however many shards there are. Files are mapped, never read whole, and never unpickled beyond tensors.
"""

import ctypes
import logging
import math
import mmap
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from llama_core.checkpoint.files import find_shards
from llama_core.config import ModelConfig
from llama_core.errors import CheckpointError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_CHUNK_BYTES = 2 << 20  # what is mapped and not yet released while a weight is copied
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DERIVED = re.compile(r"rope\.freqs$")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Full shape of a weight, and the dimension that ranks cut it along (None: every rank has all of it).

    shard_dims: the dimensions along which checkpoints are known to cut it; the first is Llama 2's.
    """

    shape: tuple[int, ...]
    rank_dim: int | None
    shard_dims: tuple[int, ...] = ()

    def part(self, index: int, count: int) -> tuple[int, ...]:
        """Shape of part `index` of `count` along `rank_dim`."""
        return self.shape if self.rank_dim is None else _cut(self.shape, self.rank_dim, count)


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight of the architecture by its name in the checkpoint, in the model's order."""
    dim, hidden, kv_dim = config.dim, config.hidden_dim, config.n_kv_heads * config.head_dim
    by_rows, by_columns = (0, (0,)), (1, (1,))
    # Llama 3 cuts the embedding by rows; in memory it is cut by columns in any case.
    specs = {"tok_embeddings.weight": WeightSpec((config.vocab_size, dim), 1, (1, 0))}
    for i in range(config.n_layers):
        prefix = f"layers.{i}."
        for name, shape, (rank_dim, shard_dims) in (
            ("attention.wq", (dim, dim), by_rows),
            ("attention.wk", (kv_dim, dim), by_rows),
            ("attention.wv", (kv_dim, dim), by_rows),
            ("attention.wo", (dim, dim), by_columns),
            ("feed_forward.w1", (hidden, dim), by_rows),
            ("feed_forward.w2", (dim, hidden), by_columns),
            ("feed_forward.w3", (hidden, dim), by_rows),
        ):
            specs[f"{prefix}{name}.weight"] = WeightSpec(shape, rank_dim, shard_dims)
        specs[f"{prefix}attention_norm.weight"] = WeightSpec((dim,), None)
        specs[f"{prefix}ffn_norm.weight"] = WeightSpec((dim,), None)
    specs["norm.weight"] = WeightSpec((dim,), None)
    specs["output.weight"] = WeightSpec((config.vocab_size, dim), 0, (0,))
    return specs


class Checkpoint:
    """Mapped shards whose names and shapes have been checked against the architecture. Nothing is allocated yet."""

    def __init__(self, ckpt_dir: str | Path, config: ModelConfig) -> None:
        """Raises CheckpointError: names the file, and the first five weights at fault."""
        self.paths = find_shards(ckpt_dir)
        self.specs = weight_specs(config)
        self._shards = [_map_shard(path) for path in self.paths]
        self._shard_dims = {name: self._check_weight(name, spec) for name, spec in self.specs.items()}
        faults = [fault for fault in self._shard_dims.values() if isinstance(fault, str)]
        for path, shard in zip(self.paths, self._shards, strict=True):
            unexpected = [name for name in shard if name not in self.specs and not _DERIVED.search(name)]
            faults += [f"{name} is unexpected in {path.name}" for name in unexpected]
        if faults:
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise CheckpointError(f"{Path(ckpt_dir)}: weights do not fit params.json: {'; '.join(faults[:5])}{more}")
        self._check_replicas()

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights as stored."""
        return self._shards[0]["output.weight"].dtype

    def verify_checksums(self, index: int, count: int) -> None:
        """Compare bytes with the CRC-32 stated for them: of every `count`-th shard, from `index`. Those who see the same files
        share them out, so that each is read once."""
        for path in self.paths[index::count]:
            try:
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
            except (OSError, zipfile.BadZipFile, EOFError) as error:
                raise CheckpointError(f"{path}: damaged: {error}") from None
            if damaged is not None:
                raise CheckpointError(f"{path}: damaged: record {damaged!r} does not match its checksum")

    def load(
        self,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Progress = lambda done, total: None,
    ) -> dict[str, torch.Tensor]:
        """Part `rank` of `world_size` of every weight, on its device. See `weights`."""
        return dict(self.weights(rank, world_size, dtype, device, on_progress))

    def num_values(self, rank: int, world_size: int) -> int:
        """Of part `rank` of `world_size` of all weights."""
        return sum(math.prod(spec.part(rank, world_size)) for spec in self.specs.values())

    def weights(
        self,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Progress = lambda done, total: None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Part `rank` of `world_size` of every weight, one after the other. `on_progress(done, total)` counts bytes.

        Peak memory is what the caller keeps, one weight and one chunk. Raises CheckpointError for a value that is not finite.
        """
        total = self.num_values(rank, world_size) * dtype.itemsize
        done = 0
        for name, spec in self.specs.items():
            weight = torch.empty(spec.part(rank, world_size), dtype=dtype, device=device)
            for path, source, target in self._pieces(name, spec, rank, world_size, weight):
                for begin, end in _chunks(source):
                    target[begin:end].copy_(source[begin:end])
                    # Of the copy: float16 may not hold what the file does. NaN spreads to the least and the greatest value,
                    # and this, unlike a sum, needs no memory.
                    if not torch.stack(torch.aminmax(target[begin:end])).isfinite().all():
                        raise CheckpointError(
                            f"{path}: {name} holds a value that is not finite as {dtype} (NaN or infinity)"
                        )
                    _release(source[begin:end])
                    done += target[begin:end].numel() * dtype.itemsize
                    on_progress(done, total)
            yield name, weight

    def _pieces(
        self, name: str, spec: WeightSpec, rank: int, world_size: int, weight: torch.Tensor
    ) -> Iterator[tuple[Path, torch.Tensor, torch.Tensor]]:
        """(shard, piece of it, its place in `weight`), piece and place of equal shape; together they fill `weight`."""
        shard_dim = self._shard_dims[name]
        assert not isinstance(shard_dim, str)
        if shard_dim is None:
            sources = [(0, self.paths[0], self._shards[0][name])]
        else:
            extent = spec.shape[shard_dim] // len(self._shards)
            shards = enumerate(zip(self.paths, self._shards, strict=True))
            sources = [(i * extent, path, shard[name]) for i, (path, shard) in shards]
        for offset, path, source in sources:
            # Where this shard's tensor begins in the full weight, and which box of the full weight this rank wants.
            source_start = [offset if d == shard_dim else 0 for d in range(source.ndim)]
            want_start = [rank * weight.shape[d] if d == spec.rank_dim else 0 for d in range(source.ndim)]
            piece, place = source, weight
            for d in range(source.ndim):
                begin = max(source_start[d], want_start[d])
                end = min(source_start[d] + source.shape[d], want_start[d] + weight.shape[d])
                piece = piece.narrow(d, begin - source_start[d], max(0, end - begin)) if begin < end else piece[:0]
                place = place.narrow(d, begin - want_start[d], max(0, end - begin)) if begin < end else place[:0]
            if piece.numel():
                yield path, piece, place

    def _check_weight(self, name: str, spec: WeightSpec) -> int | None | str:
        """The dimension that the shards cut this weight along, None if they do not; or a fault, as text."""
        count = len(self._shards)
        for path, shard in zip(self.paths, self._shards, strict=True):
            if name not in shard:
                return f"{name} is missing from {path.name}"
        shapes = [tuple(shard[name].shape) for shard in self._shards]
        if count == 1 or not spec.shard_dims:
            candidates: list[tuple[int | None, tuple[int, ...]]] = [(None, spec.shape)]
        else:
            candidates = [
                (dim, _cut(spec.shape, dim, count)) for dim in spec.shard_dims if spec.shape[dim] % count == 0
            ]
        for dim, expected in candidates:
            if all(shape == expected for shape in shapes):
                return dim
        wanted = " or ".join(str(list(expected)) for _, expected in candidates) or f"a part of {list(spec.shape)}"
        at_fault = next((i for i, shape in enumerate(shapes) if all(shape != e for _, e in candidates)), 0)
        return f"{name} has shape {list(shapes[at_fault])} in {self.paths[at_fault].name}, expected {wanted}"

    def _check_replicas(self) -> None:
        """Norms are the same in every shard of a checkpoint; where they are not, shards of two models were mixed."""
        for path, shard in zip(self.paths[1:], self._shards[1:], strict=True):
            if not torch.equal(shard["norm.weight"], self._shards[0]["norm.weight"]):
                raise CheckpointError(
                    f"{path}: norm.weight differs from {self.paths[0].name}: shards of different checkpoints"
                )


def _map_shard(path: Path) -> dict[str, torch.Tensor]:
    try:
        shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file provokes in the unpickler is the file's fault
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


def _cut(shape: tuple[int, ...], dim: int, count: int) -> tuple[int, ...]:
    return tuple(size // count if d == dim else size for d, size in enumerate(shape))


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows of about _CHUNK_BYTES as they lie in the file, gaps between rows included."""
    row_bytes = max(1, tensor.stride(0) * tensor.itemsize)
    rows = max(1, _CHUNK_BYTES // row_bytes)
    for begin in range(0, tensor.shape[0], rows):
        yield begin, min(begin + rows, tensor.shape[0])


_libc = ctypes.CDLL(None, use_errno=True)


def _release(mapped: torch.Tensor) -> None:
    """Give the pages under a mapped tensor back to the system: they are in the file, this process is done with them."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = mapped.data_ptr()
    end = begin + ((mapped.shape[0] - 1) * mapped.stride(0) + 1) * mapped.itemsize
    # Whole pages only; those at the edges belong to the neighbours too, but a page given back too early is just read again.
    begin -= begin % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
