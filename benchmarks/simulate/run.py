"""Runs one workload through a simulated fleet, and counts."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast
from unittest import mock

from benchmarks.harness.common import percentile
from benchmarks.simulate.choosers import Chooser, ChosenModel
from benchmarks.simulate.peers import DynamoSelection, RayPrefixTree
from benchmarks.simulate.pooled import Pool
from benchmarks.simulate.workload import Call, with_later
from deployments.args import EngineArgs
from deployments.fleet import served_model
from deployments.fleet.routing import POLICIES
from deployments.links import front_session
from llama_core.errors import LlamaError
from llama_core.scheduling import request as requests
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.modelled_fleet import Costs, CountedStream, ModelledEngine, ModelledFront, ModelledRanks
from tests.support.virtual_loop import VirtualLoop

POOLED: Final = "pooled"
CHOOSERS: Final[Mapping[str, Callable[[], Chooser]]] = {
    POOLED: Pool,
    "ray_prefix_tree": RayPrefixTree,
    "dynamo": DynamoSelection,
}
LONGEST_S: Final = 1e7
_UNLIMITED: Final = 10**9  # requests and tokens that may wait
Beside = Callable[["Simulation"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Setting:
    """policy: of POLICIES or CHOOSERS. speeds: of each engine from the beginning; 2 halves its costs."""

    policy: str
    costs: Costs
    num_fronts: int = 1
    speeds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    num_blocks: int = 1000
    block_size: int = 512
    max_batch_size: int = 64

    def engine_args(self, longest: int) -> EngineArgs:
        """longest: tokens of a prompt and its answer."""
        return EngineArgs(
            model_id="model",
            max_seq_len=longest,
            max_batch_size=self.max_batch_size,
            max_queue=_UNLIMITED,
            max_queue_tokens=_UNLIMITED,
            block_size=self.block_size,
            speculation=False,
            verify_checksums=False,
        )


@dataclass(slots=True)
class Outcome:
    """Times in seconds. ttft, latency: of each answered call. engine_s: of all engines, from when they were asked for.
    sequences: that each engine has completed. busy: the share of its time in which it computed. wall: of the simulation."""

    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    failed: int = 0
    makespan: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    engine_s: float = 0.0
    sequences: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    wall: float = 0.0

    def note(self, call: Call, began_s: float, first_s: float, ended_s: float, num_cached: int) -> None:
        """An answered call."""
        self.ttft.append(first_s - began_s)
        self.latency.append(ended_s - began_s)
        self.prompt_tokens += call.length - call.output
        self.cached_tokens += num_cached
        self.output_tokens += call.output

    def figures(self) -> dict[str, Any]:
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "ttft_mean_s": sum(self.ttft) / len(self.ttft),
            **{f"ttft_p{percent}_s": percentile(self.ttft, percent) for percent in (50, 90, 99)},
            "latency_mean_s": sum(self.latency) / len(self.latency),
            "makespan_s": self.makespan,
            "output_tok_s": self.output_tokens / self.makespan,
            "hit_share": self.cached_tokens / self.prompt_tokens,
            "engine_s": self.engine_s,
            "sequences": self.sequences,
            "busy": self.busy,
            "wall_s": self.wall,
        }


class Simulation:
    """`run` once. engines: those that have been started, also those that have ended."""

    def __init__(self, setting: Setting, longest: int) -> None:
        self.engines: list[ModelledEngine] = []
        self.outcome = Outcome()
        self._setting, self._args = setting, setting.engine_args(longest)
        self._chooser = CHOOSERS[setting.policy]() if setting.policy in CHOOSERS else None
        self._num_open = 0
        self._idle = asyncio.Event()

    async def run(self, calls: Sequence[Call], beside: Beside | None) -> None:
        setting, chooser, loop = self._setting, self._chooser, asyncio.get_running_loop()
        own: tuple[Any, ...] = (setting.policy,)
        if chooser is not None:
            own = next(iter(POLICIES)), partial(ChosenModel, chooser), chooser.sent
        self.fronts = [ModelledFront(*own) for _ in range(setting.num_fronts)]
        for speed in setting.speeds:
            await self.add_engine(speed)
        began_s = loop.time()
        running = loop.create_task(beside(self)) if beside is not None else None
        self._num_open = len(calls)
        for call in calls:
            loop.call_at(began_s + call.at_s, self._begin, call)
        await self._idle.wait()
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        if chooser is not None:
            chooser.close()
        outcome, outcome.makespan = self.outcome, loop.time() - began_s
        outcome.engine_s = outcome.engine_s or outcome.makespan * len(self.engines)
        outcome.sequences = [engine.num_ended for engine in self.engines]
        outcome.busy = [round(engine.ranks.busy_s / outcome.makespan, 3) for engine in self.engines]

    async def add_engine(self, speed: float = 1.0) -> ModelledEngine:
        """That all fronts have met."""
        setting = self._setting
        ranks = ModelledRanks(Costs(*(cost / speed for cost in setting.costs)), setting.num_blocks)
        engine = ModelledEngine(f"engine-{len(self.engines)}", self._args, ranks)
        self.engines.append(engine)
        await engine.start()
        if self._chooser is not None:
            self._chooser.attach(engine)
        for front in self.fronts:
            await front.meet(engine)
        return engine

    def _begin(self, call: Call) -> None:
        asyncio.get_running_loop().create_task(self._ask(call)).add_done_callback(_raise_error)

    async def _ask(self, call: Call) -> None:
        loop, outcome = asyncio.get_running_loop(), self.outcome
        front = min(
            self.fronts, key=lambda front: front.num_open
        )  # as HAProxy's leastconn, in turn where all are equal
        self.fronts.append(self.fronts.pop(self.fronts.index(front)))
        front.num_open += 1
        began_s = loop.time()
        params = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=call.output)
        try:
            (stream,) = await front.model.submit(Request([call.tokens()], [params], terms=Terms(call.owner)))
            await cast(CountedStream, stream).done
            first_s, num_cached = stream.timeline.first_token_s, stream.sequence.num_cached
        except LlamaError:
            first_s = None
        front.num_open -= 1
        if first_s is None:
            outcome.failed += 1
        else:
            outcome.note(call, began_s, first_s, loop.time(), num_cached or 0)
        for following in call.then:
            loop.call_later(following.at_s, self._begin, following)
        self._num_open += len(call.then) - 1
        if not self._num_open:
            self._idle.set()


def _raise_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # the loop notes what it raises


@contextmanager
def _light(loop: VirtualLoop) -> Iterator[None]:
    """Streams without texts, prompts that need no check, and the date of the loop's clock."""
    with ExitStack() as patches:
        for module, name, value in (
            (served_model, "SequenceStream", CountedStream),
            (requests, "check_prompt", lambda prompt, *_: prompt),
            (front_session, "check_prompt", lambda prompt, *_: prompt),
            (time, "time", loop.time),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def run(calls: Sequence[Call], setting: Setting, beside: Beside | None = None) -> Outcome:
    """Equal arguments give equal outcomes, but for `wall`. beside: runs meanwhile."""
    log = logging.getLogger("deployments")
    level = log.level
    log.setLevel(logging.WARNING)
    loop, began_s = VirtualLoop(max_run_s=LONGEST_S), time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        with _light(loop):
            simulation = Simulation(setting, max(call.length for call in with_later(calls)))
            loop.run_until_complete(simulation.run(calls, beside))
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        log.setLevel(level)
        gc.enable()
        loop.close()
    assert not loop.errors, loop.errors[0]
    simulation.outcome.wall = time.perf_counter() - began_s
    return simulation.outcome
