"""Requests through scheduler and runner on a `SimulatedDevice`, several steps ahead of what the host has read."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from llama_core.execution.parallel import Parallel
from llama_core.execution.runner import ModelRunner
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Pending, StepOutput
from tests.support import on_ranks
from tests.support.simulated_device import CapturableOps, SimulatedDevice

_RUNNER = "llama_core.execution.runner"
Requests = list[tuple[list[int], SamplingParams]]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    outputs: list[list[int]]
    logprobs: list[list[float]]
    collectives: list[Any]
    preemptions: int
    replays: int


def requests_of(seed: int, count: int = 10) -> Requests:
    """Greedy and sampled requests, some with rules or logprobs, prompts of 1 to 70 tokens, some of which repeat themselves."""
    generator = random.Random(seed)
    requests = []
    for number in range(count):
        prompt = [1, *(generator.randrange(4, 200) for _ in range(generator.choice([0, 3, 20, 69])))]
        if generator.random() < 0.3:
            prompt = prompt[:1] + prompt[1:6] * 6  # drafts are proposed
        params = SamplingParams(
            temperature=generator.choice([0.0, 0.7, 1.3]),
            top_p=generator.choice([0.5, 0.9, 1.0]),
            top_k=generator.choice([0, 0, 5]),
            seed=number,
            max_tokens=generator.choice([1, 9, 30]),
            logprobs=generator.choice([None, None, None, 2]),
            repetition_penalty=generator.choice([1.0, 1.0, 1.3]),
            ignore_eos=True,
        )
        requests.append((prompt, params))
    return requests


def simulated_runner(parallel: Parallel, ckpt_dir: str, device: SimulatedDevice, **overrides: Any) -> ModelRunner:
    with (
        patch(f"{_RUNNER}.ops_for", lambda torch_device: CapturableOps()),
        patch(f"{_RUNNER}.fused_device", lambda torch_device: device),
    ):
        return on_ranks.new_runner(parallel, ckpt_dir, backend="fused", **overrides)


def simulated(parallel: Parallel, ckpt_dir: str, requests: Requests, seed: int, eagerness: float) -> SimulatedRun:
    """Every rank is given the same arguments, and takes the same steps."""
    device = SimulatedDevice(seed + 100 * parallel.rank, eagerness)
    runner = simulated_runner(parallel, ckpt_dir, device)
    device.collectives.clear()
    generator = random.Random(seed)
    # Few blocks, so that sequences are preempted.
    pool = BlockPool(11, runner.config.block_size)
    scheduler = Scheduler(SchedulerConfig(8, 64, frozenset({2}), max_drafts=8), pool)
    sequences = [Sequence(prompt, params, min(160, len(prompt) + params.max_tokens)) for prompt, params in requests]
    waiting = deque(sequences)
    in_flight: deque[Pending[StepOutput]] = deque()
    while waiting or scheduler.has_work or in_flight:
        while waiting and generator.random() < 0.4:
            scheduler.add(waiting.popleft())
        depth = generator.choice([1, 2, 3])
        if (batch := scheduler.schedule()) is not None:
            in_flight.append(runner.start(batch))
        while in_flight and (len(in_flight) > depth or batch is None):
            scheduler.commit(in_flight.popleft().result())
    return SimulatedRun(
        [seq.output for seq in sequences],
        [[each.logprob for each in seq.logprobs] for seq in sequences],
        device.collectives,
        scheduler.num_preemptions,
        device.num_replays,
    )
