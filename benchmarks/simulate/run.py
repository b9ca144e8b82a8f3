"""Runs one workload through a simulated fleet, and counts."""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from benchmarks.harness.common import percentile
from benchmarks.simulate.fleet import Costs, CountedStream, SimulatedEngine, SimulatedFront
from benchmarks.simulate.pooled import Pool, PooledLink, PooledModel
from benchmarks.simulate.workload import Call
from deployments.args import EngineArgs
from deployments.fleet import served_model
from deployments.links import front_session
from llama_core.errors import LlamaError
from llama_core.scheduling import request as requests
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.virtual_loop import VirtualLoop

POOLED: Final = "pooled"
LONGEST_S: Final = 1e6
_UNLIMITED: Final = 10**9  # requests and tokens that may wait


@dataclass(frozen=True, slots=True)
class Setting:
    """speeds: of each engine, of which 2 halves its costs."""

    costs: Costs
    num_fronts: int = 1
    speeds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    num_blocks: int = 1000
    block_size: int = 512
    max_batch_size: int = 64
    max_step_tokens: int = 2048

    def engine_args(self, longest: int) -> EngineArgs:
        return EngineArgs(
            model_id="model",
            max_seq_len=longest,
            max_batch_size=self.max_batch_size,
            max_queue=_UNLIMITED,
            max_queue_tokens=_UNLIMITED,
            max_step_tokens=self.max_step_tokens,
            block_size=self.block_size,
            speculation=False,
            verify_checksums=False,
        )


@dataclass(slots=True)
class Outcome:
    """Times in seconds. ttft, latency: of each answered call. sequences: completed by each engine. busy: of each engine's time,
    the share in which it computed. wall: of the simulation itself."""

    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    failed: int = 0
    makespan: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    sequences: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    wall: float = 0.0

    def figures(self) -> dict[str, Any]:
        mean_ttft = sum(self.ttft) / len(self.ttft)
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "ttft_mean_s": mean_ttft,
            **{f"ttft_p{percent}_s": percentile(self.ttft, percent) for percent in (50, 90, 99)},
            "latency_mean_s": sum(self.latency) / len(self.latency),
            "makespan_s": self.makespan,
            "hit_share": self.cached_tokens / self.prompt_tokens,
            "output_tok_s": self.output_tokens / self.makespan,
            "sequences": self.sequences,
            "busy": [round(share, 3) for share in self.busy],
            "wall_s": self.wall,
        }


class Simulation:
    """`run` once."""

    def __init__(self, setting: Setting, policy: str, longest: int) -> None:
        self.setting, self.policy = setting, policy
        self.outcome = Outcome()
        self.engines: list[SimulatedEngine] = []
        self.fronts: list[SimulatedFront] = []
        self._pool = Pool() if policy == POOLED else None
        self._args = setting.engine_args(longest)
        self._open = 0
        self._idle = asyncio.Event()

    async def run(self, calls: Sequence[Call]) -> None:
        model: Any = ("least_loaded", PooledModel, PooledLink) if self._pool is not None else (self.policy,)
        self.fronts = [SimulatedFront(*model) for _ in range(self.setting.num_fronts)]
        for speed in self.setting.speeds:
            await self.add_engine(speed)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._open = len(calls)
        for call in calls:
            loop.call_at(began_s + call.at_s, self._begin, call)
        await self._idle.wait()
        outcome, self.outcome.makespan = self.outcome, loop.time() - began_s
        outcome.sequences = [engine.num_ended for engine in self.engines]
        outcome.busy = [engine.ranks.busy_s / outcome.makespan for engine in self.engines]
        for front in self.fronts:
            await front.model.stop()
        for engine in self.engines:
            assert engine.server is not None
            engine.server.close()
            await engine.service.stop()

    async def add_engine(self, speed: float = 1.0) -> None:
        """That all fronts have met."""
        costs = Costs(*(cost / speed for cost in self.setting.costs))
        engine = SimulatedEngine(f"engine-{len(self.engines)}", self._args, costs, self.setting.num_blocks)
        await engine.start()
        if self._pool is not None:
            engine.pool = self._pool
            self._pool.attach(engine)
        self.engines.append(engine)
        for front in self.fronts:
            await front.meet(engine)

    def _begin(self, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(call))
        task.add_done_callback(_raise_error)

    async def _ask(self, call: Call) -> None:
        loop, outcome = asyncio.get_running_loop(), self.outcome
        front = min(self.fronts, key=lambda front: front.num_open)  # as HAProxy's leastconn
        front.num_open += 1
        self.fronts.append(self.fronts.pop(self.fronts.index(front)))
        began_s = loop.time()
        params = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=call.output)
        terms = Terms(call.owner, call.priority)
        try:
            (stream,) = await front.model.submit(Request([call.tokens()], [params], terms=terms))
            assert isinstance(stream, CountedStream)
            await stream.done
            error = stream.error
        except LlamaError as refusal:
            error = refusal
        front.num_open -= 1
        if error is None:
            seq, timeline = stream.sequence, stream.timeline
            assert timeline.first_token_s is not None
            outcome.ttft.append(timeline.first_token_s - began_s)
            outcome.latency.append(loop.time() - began_s)
            outcome.prompt_tokens += seq.prompt_len
            outcome.cached_tokens += seq.num_cached or 0
            outcome.output_tokens += seq.length - seq.prompt_len
        else:
            outcome.failed += 1
        for following in call.then:
            self._open += 1
            loop.call_later(following.at_s, self._begin, following)
        self._open -= 1
        if not self._open:
            self._idle.set()


def _raise_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()


@contextmanager
def _light() -> Iterator[None]:
    """Streams without texts, prompts that need no check, and policies to compare with."""
    with ExitStack() as patches:
        for module, name, value in (
            (served_model, "SequenceStream", CountedStream),
            (requests, "check_prompt", lambda prompt, *_: prompt),
            (front_session, "check_prompt", lambda prompt, *_: prompt),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def run(calls: Sequence[Call], setting: Setting, policy: str, longest: int) -> Outcome:
    """longest: tokens of a prompt and its answer. Equal arguments give equal outcomes, but for `wall`."""
    logging.getLogger("deployments").setLevel(logging.WARNING)
    loop = VirtualLoop(max_run_s=LONGEST_S)
    began_s = time.perf_counter()
    simulation = Simulation(setting, policy, longest)
    gc.collect()
    gc.disable()
    try:
        with _light():
            loop.run_until_complete(simulation.run(calls))
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.01))
    finally:
        gc.enable()
        loop.close()
    assert not loop.errors, loop.errors[0]
    simulation.outcome.wall = time.perf_counter() - began_s
    return simulation.outcome
