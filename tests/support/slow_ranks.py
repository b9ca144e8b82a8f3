"""Steps of ranks of which one computes slowly, in virtual time, in a module that the rank processes can import.

A rank's time passes in its pauses alone. In a collective, every rank's time becomes the latest one of all, as if it had waited.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist

from llama_core.execution.fused.device import StepDevice
from llama_core.execution.fused.sampler import Mode, SamplingState, TorchSampler
from llama_core.execution.fused.step_plan import SampleTensors
from llama_core.execution.parallel import Parallel
from llama_core.execution.runner import ModelRunner
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.support import on_ranks
from tests.support.simulated_device import CapturableOps, SimulatedDevice

_LOADING = "llama_core.execution.rank_loading"
NUM_STEPS, PROMPT = 6, [1, 5, 9, 11]
LAYER_S, SAMPLING_S = 0.25, 4.0  # of a pause; exact in binary


class _Time:
    """This rank's. Pauses and meetings are operations of torch, so that a recorded graph repeats them at each replay."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._all_reduce = dist.all_reduce

    def pause(self, x: torch.Tensor, seconds: float) -> None:
        self.seconds += seconds

    def meet(self, x: torch.Tensor) -> None:
        now = torch.tensor([self.seconds], dtype=torch.float64)
        self._all_reduce(now, op=dist.ReduceOp.MAX)
        self.seconds = float(now)

    def nanoseconds(self) -> int:
        return int(self.seconds * 1e9)


_time: Final = _Time()
_library = torch.library.Library("llama_tests", "DEF")
_library.define("pause(Tensor x, float seconds) -> ()")
_library.define("meet(Tensor x) -> ()")
_library.impl("pause", _time.pause, "CPU")
_library.impl("meet", _time.meet, "CPU")


@contextmanager
def _virtual_time() -> Iterator[None]:
    def met(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **more: Any) -> Any:
            torch.ops.llama_tests.meet(tensor[0] if isinstance(tensor, list) else tensor)
            return collective(tensor, *args, **more)

        return call

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")
    collectives: dict[str, Any] = {name: met(getattr(dist, name)) for name in names}
    with (
        patch.multiple(dist, **collectives),
        patch("llama_core.execution.fused.ops.time", SimpleNamespace(perf_counter_ns=_time.nanoseconds)),
    ):
        yield


class _SlowSampler(TorchSampler):
    def sample(self, logits: torch.Tensor, samples: SampleTensors, mode: Mode) -> torch.Tensor:
        torch.ops.llama_tests.pause(logits, SAMPLING_S)
        return super().sample(logits, samples, mode)


class _SlowOps(CapturableOps):
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def gated_silu(self, gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        torch.ops.llama_tests.pause(gate_up, self._pause_s)
        return super().gated_silu(gate_up, bias)

    def sampler(self, state: SamplingState, max_samples: int, vocab: int) -> TorchSampler:
        return _SlowSampler(state)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of NUM_STEPS decodes of a model of `layers`."""

    steps: float
    waited: float
    sampled: float
    layers: int


def spent(parallel: Parallel, ckpt_dir: str, kind: str, slow_rank: int) -> Spent:
    """kind: "fused", whose steps are graphs on a simulated device, or "torch". The slow rank pauses in each layer, and every
    rank that samples pauses there."""
    pause_s = LAYER_S if parallel.rank == slow_rank else 0.0
    device = SimulatedDevice() if kind == "fused" else StepDevice(torch.device("cpu"))
    with _virtual_time(), patch(f"{_LOADING}.choose_ops", lambda *args, **options: (_SlowOps(pause_s), device)):
        runner = on_ranks.new_runner(parallel, ckpt_dir, backend=kind, max_batch_size=1, max_step_tokens=16)
        init = SlotInit(0, PROMPT, list(range(runner.config.blocks_per_sequence)), SamplingParams(0.7, seed=1))
        runner.step(StepInput(0, 0, [Row(0, 0, len(PROMPT), True)], admit=[init]))
        before = _totals(runner)
        for number in range(NUM_STEPS):
            runner.step(StepInput(0, 0, [Row(0, len(PROMPT) + number, 1, True)]))
        steps, waited, sampled = (after - first for after, first in zip(_totals(runner), before, strict=True))
    return Spent(steps, waited, sampled, runner.model_config.n_layers)


def _totals(runner: ModelRunner) -> tuple[float, float, float]:
    waited, sampled = runner.seconds_waited(), runner.seconds_sampled()
    assert waited is not None and sampled is not None
    return _time.seconds, waited, sampled
