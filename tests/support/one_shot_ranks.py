"""The ranks of a one-shot all-reduce in Triton's interpreter: forks of a process whose kernels are interpreted.

They map one file of a folder and join a group of gloo. They run the self-test, also with memory that does not work, and then
many sums. Each rests at random places, also between the meeting of a kernel and its reads. A rank fails if a sum differs from
the sum in the order of ranks by a bit. Not for bfloat16, to which the interpreter truncates.

With `has_switch` a simulated NVLink switch adds, in float32 alone. The interpreter has no inline assembly.
"""

import multiprocessing
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from llama_core.execution.fused import all_reduce
from llama_core.execution.fused.all_reduce import GroupAllReduce, OneShotAllReduce
from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.fused.peer_memory import PeerMemory, peer_bytes
from llama_core.execution.parallel import Parallel, join, leave, smallest

MAX_ROWS, DIM, ROUNDS = 3, 24, 12
PAGE = 4096
LIMIT_S = 200.0


def mapped_memory(path: Path, rank: int, world_size: int, row_bytes: int, *, has_switch: bool) -> PeerMemory:
    """Of all ranks' parts in a file of `file_bytes` zeros. With a switch, the first part's address is the multicast address."""
    part = file_bytes(world_size, row_bytes) // world_size
    memory = np.memmap(path, np.uint8, "r+")
    bases = [memory.ctypes.data + peer * part for peer in range(world_size)]
    if has_switch:
        from tests.support import simulated_switch

        simulated_switch.world_size, simulated_switch.part = world_size, part
    return PeerMemory.of(rank, MAX_ROWS, row_bytes, bases, torch.device("cpu"), memory, bases[0] if has_switch else 0)


def file_bytes(world_size: int, row_bytes: int) -> int:
    return world_size * -(-peer_bytes(world_size, MAX_ROWS, row_bytes) // PAGE) * PAGE


def rest_at_barriers(resting: random.Random) -> None:
    """The interpreter has nothing to do at a kernel's barriers."""
    from triton.runtime.interpreter import InterpreterBuilder

    def create_barrier(self: Any) -> None:
        time.sleep(resting.choice((0, 0, 0.001, 0.01)))

    InterpreterBuilder.create_barrier = create_barrier


def yield_at_polls() -> None:
    """Let the other ranks run while one waits for a signal: there may be fewer cores than ranks."""
    from triton.runtime.interpreter import InterpreterBuilder

    poll = InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self: Any, *args: Any) -> Any:
        os.sched_yield()
        return poll(self, *args)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def parts(world_size: int, dtype: torch.dtype, seed: int, turn: int, rows: int) -> list[torch.Tensor]:
    """What each rank adds."""
    generator = torch.Generator().manual_seed(1000 * seed + turn)
    return [torch.randn((rows, DIM), generator=generator).to(dtype) for _ in range(world_size)]


def check_self_test(memory: PeerMemory, parallel: Parallel, dtype: torch.dtype) -> None:
    """It passes, and fails on all ranks where a rank reads other memory than its peers', and where no signal arrives."""
    large = GroupAllReduce(parallel, TorchOps())
    all_reduce._TEST_POLLS, all_reduce._TEST_ROUNDS = 30, 1  # type: ignore[misc]
    buffers, signals = (each[memory.rank].repeat(memory.world_size) for each in (memory.buffers, memory.signals))
    misread = (
        replace(memory, multicast=memory.multicast + 64) if memory.has_multicast else replace(memory, buffers=buffers)
    )
    for broken in (misread, replace(memory, signals=signals)):
        assert OneShotAllReduce(broken, large).fault(parallel, DIM, dtype)
        smallest(parallel, 1)
    all_reduce._TEST_POLLS = 1 << 40  # type: ignore[misc]
    memory.missed.zero_()
    assert not OneShotAllReduce(memory, large).fault(parallel, DIM, dtype)


def run(rank: int, world_size: int, folder: Path, dtype: torch.dtype, seed: int, has_switch: bool) -> None:
    """One rank."""
    from llama_core.execution.fused.all_reduce_kernels import sum_add_norm

    torch.set_num_threads(1)
    yield_at_polls()
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    parallel = join(rank, world_size, "cpu", store)
    memory = mapped_memory(folder / "memory", rank, world_size, DIM * dtype.itemsize, has_switch=has_switch)
    check_self_test(memory, parallel, dtype)
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    rest_at_barriers(own)
    weight = torch.randn(DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for turn in range(ROUNDS):
        rows, bias = shared.randint(1, MAX_ROWS), shared.choice((None, weight))
        every = parts(world_size, dtype, seed, turn, rows)
        states = parts(1, dtype, seed, turn + 500, rows)[0]
        mine = states.clone()
        out = sum_add_norm(memory, turn % 2, mine, every[rank].clone(), weight, 1e-5, bias)
        total = sum((part.float() for part in every[1:]), every[0].float()).to(dtype)
        expected = TorchOps().add_norm(states, total, weight, 1e-5, bias)
        assert torch.equal(mine, states), f"rank {rank}, turn {turn}: {mine} is not {states}"
        assert torch.allclose(out.float(), expected.float(), atol=4e-3), turn
    assert memory.missed.item() == 0
    leave()


def run_all(world_size: int, folder: Path, dtype: torch.dtype, seed: int, *, has_switch: bool) -> None:
    """All ranks, which must end well within `LIMIT_S`."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run, args=(rank, world_size, folder, dtype, seed, has_switch))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + LIMIT_S
        # The peers of a rank that failed wait for it.
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            assert time.monotonic() < deadline, "a rank waits for ever"
            time.sleep(0.02)
        assert [rank.exitcode for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
