"""One of two ranks is killed while both replay: when its memory is free, and when the survivor and its memory are gone.

The survivor waits in a collective, perhaps for ever. It is killed as soon as the death of its peer is seen, as the server does.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.rank_processes import RankProcesses
from benchmarks.gpu.recorder import Recorder, waited
from benchmarks.gpu.settings import Settings

_LIMIT_S = 60.0
_REPLAYING_S = 0.5  # before the kill
_VICTIM, _SURVIVOR = 1, 0


def run(record: Recorder, settings: Settings) -> None:
    record.measure("nccl", partial(loss, settings))


def loss(settings: Settings) -> dict[str, object]:
    """Seconds after the kill. memory_before_gb: that the victim held."""
    idle = [free_bytes(settings, rank) for rank in range(2)]
    with RankProcesses("replay", 2, settings) as ranks:
        next(ranks.figures())
        time.sleep(_REPLAYING_S)
        held = [idle[rank] - free_bytes(settings, rank) for rank in range(2)]
        victim, survivor = ranks.processes[_VICTIM], ranks.processes[_SURVIVOR]
        begin = time.perf_counter()
        victim.kill()
        victim.wait()
        ended_by_itself = survivor.poll() is not None
        survivor.kill()

        def is_free(rank: int) -> bool:
            return free_bytes(settings, rank) >= idle[rank] - 0.01 * held[rank]

        found: dict[str, object] = {"memory_before_gb": held[_VICTIM] / 1e9}
        found["memory_free_s"] = _seconds(begin, lambda: is_free(_VICTIM))
        found["survivor_gone_s"] = _seconds(begin, lambda: survivor.poll() is not None)
        found["survivor_memory_free_s"] = _seconds(begin, lambda: is_free(_SURVIVOR))
        return found | {"survivor_ended_by_itself": ended_by_itself}


def free_bytes(settings: Settings, index: int) -> int:
    """Of the GPU with this index. On a CPU, nothing is known of a process's memory."""
    return torch.cuda.mem_get_info(index)[0] if settings.device == "cuda" else 0


def _seconds(begin: float, is_reached: Callable[[], bool]) -> float | str:
    found = waited(is_reached, _LIMIT_S)
    return time.perf_counter() - begin if found is not None else f"not within {_LIMIT_S:g} s"
