"""All-reduce of the ranks' parts of a product: by NCCL or gloo, or for small steps in memory that all GPUs of a host read.

The second way has fewer launches and fewer synchronizations of the ranks, whose latency is much of a decode step on several
GPUs.
"""

import logging
from typing import Final, Protocol

import torch

from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution.fused.ops import Ops
from llama_core.execution.fused.peer_memory import (
    FOREVER,
    PeerMemory,
    multicast_buffer,
    one_shot_rows,
    share_memory,
    world_group,
)
from llama_core.execution.parallel import Parallel, smallest

log = logging.getLogger(__name__)

_TEST_POLLS: Final = 5_000_000  # reads of a signal before the self-test fails: some seconds
_TEST_ROUNDS: Final = 4
_MULTIMEM_BYTES: Final = 8 * 2**20


class AllReduce(Protocol):
    """All-reduces, which every rank calls in the same order, with the same shapes. nbytes: memory that it keeps on this
    rank."""

    @property
    def nbytes(self) -> int: ...

    def add_norm(
        self,
        hidden_states: torch.Tensor,
        partial: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        turn: int,
    ) -> torch.Tensor:
        """hidden_states [T, dim] += the sum of all ranks' `partial` [T, dim] + bias [dim], in place; then RMSNorm of it, a new
        tensor. `partial` may be overwritten. turn: which of two buffers to use, 0 and 1 alternately."""


class GroupAllReduce:
    """All-reduce by the process group's library: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, parallel: Parallel, ops: Ops, *, batch_invariant: bool = False) -> None:
        """batch_invariant: add in the order of the ranks, for any T."""
        self._sum = parallel.sum_in_rank_order if batch_invariant else parallel.sum
        self._ops = ops

    @property
    def nbytes(self) -> int:
        return 0

    def add_norm(
        self,
        hidden_states: torch.Tensor,
        partial: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        turn: int,
    ) -> torch.Tensor:
        return self._ops.add_norm(hidden_states, self._sum(partial), weight, eps, bias)


class OneShotAllReduce:
    """One-shot all-reduce in the kernel that adds and norms; NVLink's switch adds if the memory has a multicast address. Steps
    with more than `max_rows` rows go to `large`."""

    def __init__(self, memory: PeerMemory, large: AllReduce) -> None:
        # Imported here, because most machines without a GPU have no Triton.
        from llama_core.execution.fused.all_reduce_kernels import sum_add_norm

        self._memory = memory
        self._large = large
        self._sum_add_norm = sum_add_norm

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + self._large.nbytes

    def add_norm(
        self,
        hidden_states: torch.Tensor,
        partial: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        turn: int,
    ) -> torch.Tensor:
        if len(partial) > self._memory.max_rows:
            return self._large.add_norm(hidden_states, partial, weight, eps, bias, turn)
        return self._sum_add_norm(self._memory, turn, hidden_states, partial, weight, eps, bias)

    @property
    def max_rows(self) -> int:
        return self._memory.max_rows

    def _agree(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether the sums are right: equal bits for sums in the order of ranks; for the switch's sums, within the rounding of
        another order and of the result."""
        if not self._memory.has_multicast:
            return torch.equal(found, expected)
        partial_sums = 4 * self._memory.world_size**2 * torch.finfo(torch.float32).eps
        rounding = 2 * torch.finfo(found.dtype).eps * expected.float().abs() + partial_sums
        return bool(((found.float() - expected.float()).abs() <= rounding).all())

    def fault(self, parallel: Parallel, dim: int, dtype: torch.dtype) -> str:
        """Test sums through this memory. Returns what is wrong, "" if nothing. All ranks call it together.

        Waits are limited during the test, so that a GPU which does not see its peers' writes fails the test instead of hanging.
        """
        memory, device = self._memory, parallel.device
        generator = torch.Generator(device).manual_seed(parallel.rank)
        weight = torch.ones(dim, dtype=dtype, device=device)
        memory.polls.fill_(0)
        for turn in (0, 1):  # compiles the kernel; ranks take unequally long for it
            states = torch.zeros((1, dim), dtype=dtype, device=device)
            self._sum_add_norm(memory, turn, states, states.clone(), weight, 1e-5)
        smallest(parallel, 1)  # waits for all ranks
        memory.polls.fill_(_TEST_POLLS)
        memory.missed.zero_()
        equal = True
        for turn in (0, 1) * _TEST_ROUNDS:
            for rows in (1, memory.max_rows):
                partial = torch.randn((rows, dim), generator=generator, device=device).to(dtype)
                states = torch.zeros_like(partial)
                self._sum_add_norm(memory, turn, states, partial, weight, 1e-5)
                # A rank that has found a wrong sum continues, because the others wait for it in this collective.
                expected = parallel.sum_in_rank_order(partial)
                equal = self._agree(states, expected) and equal
        memory.polls.fill_(FOREVER)
        return "" if equal and not memory.missed.item() else "sums in the self-test were wrong"


class MultimemAllReduce:
    """All-reduce by NVLink's switch with torch's kernel, for steps with more rows than `OneShotAllReduce` takes. Steps with
    more rows than the buffer go to `large`."""

    def __init__(self, buffer: torch.Tensor, group_name: str, ops: Ops, large: AllReduce) -> None:
        """buffer: symmetric memory [rows, dim] in the dtype of the model."""
        self._buffer = buffer
        self._group_name = group_name
        self._ops = ops
        self._large = large

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def add_norm(
        self,
        hidden_states: torch.Tensor,
        partial: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        turn: int,
    ) -> torch.Tensor:
        if len(partial) > len(self._buffer):
            return self._large.add_norm(hidden_states, partial, weight, eps, bias, turn)
        total = self._buffer[: len(partial)]
        total.copy_(partial)
        # Waits for all ranks before and after, so one buffer is enough.
        torch.ops.symm_mem.multimem_all_reduce_(total, "sum", self._group_name)
        return self._ops.add_norm(hidden_states, total, weight, eps, bias)


def choose_all_reduce(config: EngineConfig, parallel: Parallel, ops: Ops, dim: int, dtype: torch.dtype) -> AllReduce:
    """The all-reduce that `config.all_reduce` names; for "auto", one-shot where it works, else the group's library. All ranks
    call it together and choose the same.

    Raises ConfigError where the named one does not work.
    """
    group = GroupAllReduce(parallel, ops, batch_invariant=config.batch_invariant)
    wanted = config.all_reduce
    if parallel.world_size == 1 or wanted == "nccl":
        return group
    found: AllReduce | str
    if parallel.device.type != "cuda":
        found = "the ranks have no GPUs"
    elif wanted == "multimem":
        found = _multimem(config, parallel, ops, dim, dtype, group)
    else:
        found = _one_shot(parallel, dim, dtype, group)
    if not isinstance(found, str):
        return found
    if wanted != "auto":
        raise ConfigError(f"all_reduce {wanted} cannot be used: {found}", param="all_reduce")
    log.info("rank %d: no one-shot all-reduce: %s", parallel.rank, found)
    return group


def _one_shot(parallel: Parallel, dim: int, dtype: torch.dtype, group: AllReduce) -> AllReduce | str:
    row_bytes = dim * dtype.itemsize
    own_rows = one_shot_rows(parallel.world_size, row_bytes, _num_processors(parallel))
    rows = smallest(parallel, own_rows)
    if rows == 0:
        return "another rank cannot" if own_rows else f"a row has {row_bytes} bytes"
    memory = share_memory(parallel, rows, row_bytes)
    return memory if isinstance(memory, str) else _tested(OneShotAllReduce(memory, group), parallel, dim, dtype)


def _tested(made: OneShotAllReduce, parallel: Parallel, dim: int, dtype: torch.dtype) -> OneShotAllReduce | str:
    fault = made.fault(parallel, dim, dtype)
    if not smallest(parallel, not fault):
        return fault or "another rank's self-test failed"
    log.info("rank %d sums steps of up to %d tokens in one kernel", parallel.rank, made.max_rows)
    return made


def _num_processors(parallel: Parallel) -> int:
    return int(torch.cuda.get_device_properties(parallel.device).multi_processor_count)


def _multimem(
    config: EngineConfig, parallel: Parallel, ops: Ops, dim: int, dtype: torch.dtype, group: AllReduce
) -> AllReduce | str:
    if config.batch_invariant:
        return "its order of summation is not known, which batch_invariant needs"
    if dtype == torch.float16:
        return "it has no float16"
    row_bytes = dim * dtype.itemsize
    buffer = multicast_buffer(parallel, _MULTIMEM_BYTES // row_bytes, dim, dtype)
    if isinstance(buffer, str):
        return buffer
    large = MultimemAllReduce(buffer, world_group().group_name, ops, group)
    # All rows' programs run at once, because each waits for its peers'.
    memory = share_memory(parallel, smallest(parallel, _num_processors(parallel)), row_bytes, multicast=True)
    return memory if isinstance(memory, str) else _tested(OneShotAllReduce(memory, large), parallel, dim, dtype)
