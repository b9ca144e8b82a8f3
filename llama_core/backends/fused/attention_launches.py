"""Launch parameters of attention by the GPU's shared memory: rows, positions, warps and pipeline stages of a program."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
import triton

from llama_core.backends.fused import attention_kernels
from llama_core.backends.fused.attention_kernels import Form
from llama_core.backends.fused.layer_kernels import early_launch, has_much_shared_memory
from llama_core.backends.fused.step_memory import PROGRAMS_PER_MULTIPROCESSOR, combines_in_kernel, split_count
from llama_core.backends.fused.step_plan import AttentionTiles
from llama_core.backends.kv_cache import FLOAT8_BYTES
from llama_core.model.operations import FULL_ATTENTION

MIN_DOT: Final = 16  # the smallest side of a matrix product on tensor cores
# With this num_stages or more, a program loads the next positions' keys and values, and the block numbers of those after them,
# while it computes. With fewer, it waits for the load that it has just begun, because the keys' addresses are loaded as well.
_DOUBLE_BUFFERED: Final = 5
_LOG2_E: Final = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Launch:
    """rows: a program's queries times the query heads that share a key head. positions: cached positions read per iteration.
    most_registers: per thread; None: no limit but the compiler's."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int
    most_registers: int | None = None

    def options(self, group: int, head_dim: int, block_size: int, window: int) -> dict[str, Any]:
        """Of `_attend`."""
        queries, dim_block = self.rows // group, _dim_block(head_dim)
        return {
            "form": Form(group, queries, self.rows, self.positions, head_dim, dim_block, block_size, window),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.most_registers,
        }


def _dim_block(head_dim: int) -> int:
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))


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


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: AttentionTiles,
    window: int = FULL_ATTENTION,
    scale: float | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """See `ops.TorchOps.attend`. The tiles have the sizes of `TritonOps.tile_sizes` for the same `batch_invariant`."""
    n_heads, head_dim = q.shape[1:]
    block_size, n_kv_heads = keys.shape[1:3]
    group = n_heads // n_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    about = group, head_dim, block_size, window
    read = q, (keys, values), block_tables
    sizes = (head_dim**-0.5 if scale is None else scale) * _LOG2_E, q.stride(0), block_tables.stride(0)
    decode, chunk = launches(group, q.dtype, head_dim, batch_invariant=batch_invariant)
    if keys.dtype == FLOAT8_BYTES:
        decode, chunk = reading_float8(decode, chunk, q.dtype)
    if count := len(tiles.decodes):
        num_splits = split_count(block_tables.shape[1] * block_size, window)
        combines, programs = combines_in_kernel(count, n_kv_heads), 1
        results = log_sums = out  # the kernel writes no log_sums where it combines
        if not combines:
            most = PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(q.device)
            programs = min(num_splits, triton.cdiv(most, count * n_kv_heads))
            results = torch.empty((count, n_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
            log_sums = torch.empty((count, n_heads, num_splits), dtype=torch.float32, device=q.device)
        attention_kernels._attend[(n_kv_heads, count, programs)](
            tiles.decodes,
            *read,
            results,
            log_sums,
            *sizes,
            num_splits,
            n_kv_heads,
            **decode.options(*about),
            **early_launch(),
            is_decode=True,
            is_split=True,
            combines=combines,
        )
        if not combines:
            combine_splits(results, log_sums, tiles.decodes, out, window)
    if count := len(tiles.chunks):
        attention_kernels._attend[(count, n_kv_heads)](
            tiles.chunks,
            *read,
            out,
            out,
            *sizes,
            1,
            n_kv_heads,
            **chunk.options(*about),
            **early_launch(),
            is_decode=False,
            is_split=batch_invariant,
            combines=batch_invariant,
        )
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def combine_splits(
    partial: torch.Tensor, log_sums: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, window: int
) -> None:
    """Write the results of all decode tokens to `out` [T, H, head_dim], from those that `_attend` has written for each split:
    partial float32 [decode tokens, H, splits, head_dim], log_sums [decode tokens, H, splits]."""
    n_heads, num_splits, head_dim = partial.shape[1:]
    attention_kernels._combine_splits[(len(tiles), n_heads)](
        partial,
        log_sums,
        tiles,
        out,
        num_splits,
        n_heads,
        head_dim=head_dim,
        dim_block=_dim_block(head_dim),
        window=window,
        num_warps=1,
        **early_launch(),
    )
