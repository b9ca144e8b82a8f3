"""Launch parameters of attention by the GPU's shared memory: rows, positions, warps and pipeline stages of a program."""

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton

from llama_core.execution.fused.shared_memory import has_much_shared_memory
from llama_core.execution.fused.step_plan import TileSizes

MIN_DOT: Final = 16  # the smallest side of a matrix product on tensor cores
# With this num_stages or more, a program loads the next positions' keys and values, and the block numbers of those after them,
# while it computes. With fewer, it waits for the load that it has just begun, because the keys' addresses are loaded as well.
_DOUBLE_BUFFERED: Final = 5


@dataclass(frozen=True, slots=True)
class Launch:
    """rows: a program's queries times the query heads that share a key head. positions: cached positions read per iteration.
    most_registers: per thread; None: no limit but the compiler's."""

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


def _registers_for(programs: int, num_warps: int) -> int:
    """The most registers per thread, a multiple of 8, with which so many programs run on a multiprocessor."""
    return 65_536 // (programs * num_warps * 32) // 8 * 8


def _decode_launch(group: int, dtype: torch.dtype, head_dim: int) -> Launch:
    rows = max(MIN_DOT, triton.next_power_of_2(group))
    if dtype == torch.float32:  # float32 products use no tensor cores, and hold both operands in registers
        return Launch(rows, 32, 8, 2)
    # With this limit a multiprocessor has registers for four programs. Targets with less shared memory have no room for four,
    # smaller heads need fewer registers anyway, and larger heads or groups would spill.
    is_limited = has_much_shared_memory() and 64 < head_dim <= 128 and rows <= 32
    most_registers = _registers_for(4, num_warps=4) if is_limited else None
    return Launch(rows, 32, 4, _DOUBLE_BUFFERED, most_registers)


def _chunk_launch(group: int, dtype: torch.dtype, head_dim: int) -> Launch:
    if dtype == torch.float32:
        return _decode_launch(group, dtype, head_dim)
    if head_dim > 128:
        num_warps = 4 if has_much_shared_memory() else 8
        return Launch(max(32, triton.next_power_of_2(group)), 32, num_warps, _DOUBLE_BUFFERED)
    # All rows of a program share the keys and values that it loads: twice the rows halve the bytes read from the L2 cache.
    rows, num_warps = (128, 8 if head_dim > 64 else 4) if has_much_shared_memory() else (64, 8)
    return Launch(max(rows, triton.next_power_of_2(group)), 64, num_warps, _DOUBLE_BUFFERED)


def _invariant_launch(group: int, dtype: torch.dtype, head_dim: int) -> Launch:
    """The same launch for decodes and for chunks, so with fewer rows than chunks have otherwise.

    A chunk's program holds two sums: of the current split and of all splits so far. Where one program takes all shared memory,
    double buffering would spill registers as well (64 bytes on sm_120).
    """
    launch = _chunk_launch(group, dtype, head_dim)
    num_stages = launch.num_stages if has_much_shared_memory() else 2
    rows = min(launch.rows, max(64, triton.next_power_of_2(group)))
    return replace(launch, rows=rows, num_warps=8, num_stages=num_stages)


def tile_sizes(
    n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, *, batch_invariant: bool = False
) -> TileSizes:
    """Tokens of a tile in decodes and in chunks: the rows of a launch, divided by the query heads that share a key head."""
    group = n_heads // n_kv_heads
    decode, chunk = launches(group, dtype, head_dim, batch_invariant=batch_invariant)
    return TileSizes(decode.rows // group, chunk.rows // group)


def launches(group: int, dtype: torch.dtype, head_dim: int, *, batch_invariant: bool) -> tuple[Launch, Launch]:
    """The launch of decodes and that of chunks."""
    if batch_invariant:
        launch = _invariant_launch(group, dtype, head_dim)
        return launch, launch
    return _decode_launch(group, dtype, head_dim), _chunk_launch(group, dtype, head_dim)


def reading_float8(decode: Launch, chunk: Launch, dtype: torch.dtype) -> tuple[Launch, Launch]:
    """The launches for a float8 cache, whose values are expanded in registers: a program reads fewer positions, or has more
    registers or warps. Where a limit lets four programs run on a multiprocessor, three run here, unless they would spill."""
    if dtype == torch.float32:
        return replace(decode, positions=MIN_DOT), replace(chunk, positions=MIN_DOT)
    is_limited = decode.most_registers is not None and decode.rows == MIN_DOT
    most_registers = _registers_for(3, decode.num_warps) if is_limited else None
    return replace(decode, most_registers=most_registers), replace(chunk, num_warps=8)
