"""Requests through scheduler and runner on a `SimulatedDevice`, several steps ahead of what the host has read."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llama_core.backends.parallel import Parallel, alone
from llama_core.backends.runner import ModelRunner
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Pending, StepOutput
from tests.support import on_ranks
from tests.support.simulated_device import CapturableOps, SimulatedDevice

_LOADING = "llama_core.backends.rank_loading"
Requests = list[tuple[list[int], SamplingParams]]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    outputs: list[list[int]]
    logprobs: list[list[float]]
    collectives: list[Any]
    preemptions: int
    replays: int
    drafts_accepted: int
    drafts_refused: int


def requests_of(seed: int, count: int = 10) -> Requests:
    """Greedy and sampled requests, half of them with rules, some with logprobs, prompts of 1 to 70 tokens, some of which repeat
    themselves."""
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
            **(rules_of(seed, number) if number % 2 else {}),
        )
        requests.append((prompt, params))
    return requests


def rules_of(seed: int, number: int) -> dict[str, Any]:
    generator = random.Random(1000 * seed + number)

    def some(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(200) for _ in range(count))

    return {
        "min_p": generator.choice([0.0, 0.1]),
        "presence_penalty": generator.choice([0.0, 0.9]),
        "frequency_penalty": generator.choice([0.0, -0.4]),
        "logit_bias": tuple((token, generator.uniform(-4, 4)) for token in some(9)),
        "bad_words": tuple(some(generator.choice([1, 2])) for _ in range(20)),
        "allowed_token_ids": generator.choice([(), tuple(range(30, 200))]),
        "min_tokens": generator.choice([0, 1]),
    }


@contextmanager
def _uninitialized_is_nan() -> Iterator[None]:
    """Weights that have not arrived are NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def simulated_runner(parallel: Parallel, ckpt_dir: str, device: SimulatedDevice, **overrides: Any) -> ModelRunner:
    with (
        patch(f"{_LOADING}.choose_ops", lambda kind, torch_device, **options: (CapturableOps(), device)),
        _uninitialized_is_nan(),
    ):
        return on_ranks.new_runner(parallel, ckpt_dir, backend="fused", **overrides)


def simulated(
    parallel: Parallel,
    ckpt_dir: str,
    requests: Requests,
    seed: int,
    eagerness: float,
    stop_ids: frozenset[int] = frozenset({2}),
    lost_after: int = -1,
    num_blocks: int = 11,
    **overrides: Any,
) -> SimulatedRun:
    """Every rank is given the same arguments, and takes the same steps. lost_after: steps after which the ranks are lost and
    replaced by new ones."""
    device = SimulatedDevice(seed + 100 * parallel.rank, eagerness)
    runner = simulated_runner(parallel, ckpt_dir, device, **overrides)
    config = runner.config
    device.collectives.clear()
    generator = random.Random(seed)
    # Few blocks, so that sequences are preempted.
    pool = BlockPool(num_blocks, config.block_size)
    scheduler = Scheduler(SchedulerConfig(config.max_batch_size, config.max_step_tokens, stop_ids, max_drafts=8), pool)
    sequences = [
        Sequence(prompt, params, min(config.max_seq_len, len(prompt) + params.max_tokens))
        for prompt, params in requests
    ]
    waiting = deque(sequences)
    in_flight: deque[Pending[StepOutput]] = deque()
    while waiting or scheduler.has_work or in_flight:
        while waiting and generator.random() < 0.4:
            scheduler.add(waiting.popleft())
        if lost_after == 0:
            in_flight.clear()
            scheduler.restart(epoch=1)
            runner = simulated_runner(parallel, ckpt_dir, device, **overrides)
        lost_after -= 1
        depth = generator.choice([1, 2, 3])
        if (batch := scheduler.schedule()) is not None:
            in_flight.append(runner.start(batch))
        while in_flight and (len(in_flight) > depth or batch is None):
            output = in_flight.popleft().result()
            # Rank 0 alone knows what grammars force.
            scheduler.commit(output if parallel.world_size == 1 else replace(output, forced=[]))
    return SimulatedRun(
        [seq.output for seq in sequences],
        [[each.logprob for each in seq.logprobs] for seq in sequences],
        device.collectives,
        scheduler.num_preemptions,
        device.num_replays,
        scheduler.speculation.num_accepted,
        scheduler.speculation.num_drafts - scheduler.speculation.num_accepted,
    )


@cache
def expected_outputs(ckpt_dir: str, seed: int, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Each request alone, on the reference backend."""
    outputs, logprobs = [], []
    for request in requests_of(seed, count):
        alone_run = on_ranks.serve(alone("cpu"), ckpt_dir, [request], backend="torch")
        outputs += alone_run["outputs"]
        logprobs += alone_run["logprobs"]
    return outputs, logprobs


def assert_expected(run: SimulatedRun, ckpt_dir: str, seed: int, count: int) -> None:
    outputs, logprobs = expected_outputs(ckpt_dir, seed, count)
    assert run.outputs == outputs
    for mine, theirs in zip(run.logprobs, logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert run.replays > 0
