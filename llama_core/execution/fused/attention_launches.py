"""How attention is launched: the rows, positions, warps and pipeline stages of a program, by the GPU's shared memory."""

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton

from llama_core.execution.fused.shared_memory import has_much_shared_memory
from llama_core.execution.fused.step_plan import TileSizes

MIN_DOT: Final = 16  # the smallest side of a matrix product on tensor cores
# From these stages on, Triton loads the next positions' keys and values, and the block numbers of those behind them, while it
# computes. With fewer it waits for what it has just begun to load, because addresses are loaded too.
_DOUBLE_BUFFERED: Final = 5


@dataclass(frozen=True, slots=True)
class Launch:
    """rows: queries times the heads that share a key head. positions: cached positions that are read at a time. most_registers:
    of a thread; None: as many as the compiler takes."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int
    most_registers: int | None = None

    def constants(self, group: int) -> dict[str, int | None]:
        return {
            "rows": self.rows,
            "queries": self.rows // group,
            "tile": self.positions,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.most_registers,
        }


def _decode_launch(group: int, dtype: torch.dtype, head_dim: int) -> Launch:
    rows = max(MIN_DOT, triton.next_power_of_2(group))
    if dtype == torch.float32:  # such products use no tensor cores, and hold both factors in registers
        return Launch(rows, 32, 8, 2)
    # A multiprocessor then has registers for four programs. Other targets lack the shared memory for four, smaller heads need
    # fewer registers, and larger heads or groups would spill them.
    is_limited = has_much_shared_memory() and 64 < head_dim <= 128 and rows <= 32
    most_registers = 65_536 // (4 * 4 * 32) if is_limited else None
    return Launch(rows, 32, 4, _DOUBLE_BUFFERED, most_registers)


def _chunk_launch(group: int, dtype: torch.dtype, head_dim: int) -> Launch:
    if dtype == torch.float32:
        return _decode_launch(group, dtype, head_dim)
    if head_dim > 128:
        num_warps = 4 if has_much_shared_memory() else 8
        return Launch(max(32, triton.next_power_of_2(group)), 32, num_warps, _DOUBLE_BUFFERED)
    # All rows use each position that is loaded: twice as many rows load half as many bytes from the L2 cache.
    rows, num_warps = (128, 8 if head_dim > 64 else 4) if has_much_shared_memory() else (64, 8)
    return Launch(max(rows, triton.next_power_of_2(group)), 64, num_warps, _DOUBLE_BUFFERED)


def _invariant_launch(group: int, dtype: torch.dtype, head_dim: int) -> Launch:
    """Of decodes and chunks alike, so with fewer rows. A program of a chunk holds two sums, of a split and of all so far. Where
    one program has all shared memory, double buffers as well would spill registers (64 bytes on sm_120)."""
    launch = _chunk_launch(group, dtype, head_dim)
    num_stages = launch.num_stages if has_much_shared_memory() else 2
    rows = min(launch.rows, max(64, triton.next_power_of_2(group)))
    return replace(launch, rows=rows, num_warps=8, num_stages=num_stages)


def tile_sizes(
    n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, *, batch_invariant: bool = False
) -> TileSizes:
    group = n_heads // n_kv_heads
    decode, chunk = launches(group, dtype, head_dim, batch_invariant=batch_invariant)
    return TileSizes(decode.rows // group, chunk.rows // group)


def launches(group: int, dtype: torch.dtype, head_dim: int, *, batch_invariant: bool) -> tuple[Launch, Launch]:
    """Of decodes and of chunks."""
    if batch_invariant:
        launch = _invariant_launch(group, dtype, head_dim)
        return launch, launch
    return _decode_launch(group, dtype, head_dim), _chunk_launch(group, dtype, head_dim)


def reading_float8(decode: Launch, chunk: Launch, dtype: torch.dtype) -> tuple[Launch, Launch]:
    """The launches for a cache of float8, whose values are expanded in registers: fewer of them, or more threads."""
    if dtype == torch.float32:
        return replace(decode, positions=MIN_DOT), replace(chunk, positions=MIN_DOT)
    return replace(decode, most_registers=None), replace(chunk, num_warps=8)
