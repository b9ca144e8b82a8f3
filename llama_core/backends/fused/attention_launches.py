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
from llama_core.backends.kv_cache import FLOAT8_BYTES, KVCache
from llama_core.model.operations import Attend

MIN_DOT: Final = 16  # the smallest side of a matrix product on tensor cores
# With this num_stages or more, a program loads the next positions' keys and values, and the block numbers of those after them,
# while it computes. With fewer, it waits for the load that it has just begun, because the keys' addresses are loaded as well.
_DOUBLE_BUFFERED: Final = 5
_LOG2_E: Final = math.log2(math.e)
Results = tuple[torch.Tensor, torch.Tensor]  # `out` and `log_sums` of `_attend`


@dataclass(frozen=True, slots=True)
class Launch:
    """rows: a program's queries times the query heads that share a key head. positions: cached positions read per iteration.
    most_registers: per thread; None: no limit but the compiler's."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int
    most_registers: int | None = None

    def form(self, group: int, head_dim: int, block_size: int, window: int, **mode: bool) -> Form:
        dim_block = max(MIN_DOT, triton.next_power_of_2(head_dim))
        return Form(
            group, self.rows // group, self.rows, self.positions, head_dim, dim_block, block_size, window, **mode
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.most_registers}


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
    cache: KVCache,
    block_tables: torch.Tensor,
    tiles: AttentionTiles,
    how: Attend,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """See `ops.TorchOps.attend`. The tiles have the sizes of `TritonOps.tile_sizes` for the same `batch_invariant`."""
    n_heads, head_dim = q.shape[1:]
    block_size, n_kv_heads = cache.keys.shape[1:3]
    group, out = n_heads // n_kv_heads, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    queries = q, q.stride(0), (head_dim**-0.5 if how.scale is None else how.scale) * _LOG2_E

    def launch(
        grid: tuple[int, ...], chosen: Launch, tiles: torch.Tensor, results: Results, num_splits: int, **mode: bool
    ) -> Form:
        form = chosen.form(group, head_dim, block_size, how.window, **mode)
        sizes, options = (block_tables.stride(0), num_splits, n_kv_heads), chosen.options | early_launch()
        attention_kernels._attend[grid](tiles, queries, cache, block_tables, results, *sizes, form, **options)
        return form

    decode, chunk = launches(group, q.dtype, head_dim, batch_invariant=batch_invariant)
    if cache.keys.dtype == FLOAT8_BYTES:
        decode, chunk = reading_float8(decode, chunk, q.dtype)
    if count := len(tiles.decodes):
        num_splits = split_count(block_tables.shape[1] * block_size, how.window)
        combines, programs = combines_in_kernel(count, n_kv_heads), 1
        results = out, out  # the kernel writes no sums where it combines
        if not combines:
            most = PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(q.device)
            programs = min(num_splits, triton.cdiv(most, count * n_kv_heads))
            shape = count, n_heads, num_splits
            results = (
                torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device),
                torch.empty(shape, dtype=torch.float32, device=q.device),
            )
        grid, mode = (n_kv_heads, count, programs), {"is_decode": True, "is_split": True, "combines": combines}
        form = launch(grid, decode, tiles.decodes, results, num_splits, **mode)
        if not combines:
            combine_splits(*results, tiles.decodes, out, form)
    if count := len(tiles.chunks):
        mode = {"is_decode": False, "is_split": batch_invariant, "combines": batch_invariant}
        launch((count, n_kv_heads), chunk, tiles.chunks, (out, out), 1, **mode)
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def combine_splits(
    partial: torch.Tensor, log_sums: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, form: Form
) -> None:
    """Write the results of all decode tokens to `out` [T, H, head_dim], from those that `_attend` has written for each split:
    partial float32 [decode tokens, H, splits, head_dim], log_sums [decode tokens, H, splits]."""
    n_heads, num_splits = partial.shape[1:3]
    attention_kernels._combine_splits[(len(tiles), n_heads)](
        partial, log_sums, tiles, out, num_splits, n_heads, form, num_warps=1, **early_launch()
    )
