"""How far is the simulator from real processes? The same requests over real sockets, and in virtual time."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.harness.common import emit, percentile, print_table
from benchmarks.harness.options import question_parser
from benchmarks.harness.paced import NUM_BLOCKS, ROW_MS, STEP_MS, TOKEN_MS, PacedRunner
from benchmarks.simulate.command import add_fleet_options, add_workload_options, setting_of, workload
from benchmarks.simulate.run import Outcome, Setting, run
from benchmarks.simulate.workload import Call, with_later
from deployments.args import EngineArgs, IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.service import LlamaService
from deployments.fleet.fleet import Fleet
from deployments.links.invitation import Invitation
from deployments.openai.plan import engine_of
from llama_core.config import EngineConfig
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape
from tests.support.fake_cluster import NODE
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.modelled_fleet import Costs, ModelledEngine

LEAD_S: Final = 1.0  # until the first request, when every process is ready
Steps = list[tuple[int, int, float]]  # tokens of prompts, decodes, milliseconds


class ThreadRanks(FakeGroup):
    """A rank's runner in a thread of the engine's process."""

    def __init__(self, runner: Any, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self._runner, self._thread = runner, ThreadPoolExecutor(1)
        self.measured: Steps = []

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._run, batch)

    def _run(self, batch: StepInput) -> StepOutput:
        began_s, shape = time.perf_counter(), StepShape.of(batch)
        output: StepOutput = self._runner.start(batch).result()
        elapsed_ms = 1e3 * (time.perf_counter() - began_s)
        self.measured.append((shape.num_prompt_tokens, shape.num_decodes, elapsed_ms))
        return replace(output, elapsed_ms=elapsed_ms)


def _runner_of(args: EngineArgs, setting: Setting, *, is_real: bool) -> Any:
    if not is_real:
        costs = dict(zip((STEP_MS, TOKEN_MS, ROW_MS), map(str, setting.costs), strict=True))
        os.environ |= costs | {NUM_BLOCKS: str(setting.num_blocks)}
        return PacedRunner(1024)
    import torch

    from llama_core.backends import parallel
    from llama_core.backends.runner import ModelRunner

    torch.set_num_threads(1)
    config: EngineConfig = LlamaService(args, FakeGroupPool(FakeGroup)).config
    runner = ModelRunner.load(replace(config, device="cpu"), parallel.alone("cpu"))
    runner.allocate_cache(setting.num_blocks)
    runner.warm_up()
    return runner


def _engine(pipe: Connection, name: str, args: EngineArgs, setting: Setting, is_real: bool) -> None:
    async def serve() -> None:
        ranks = ThreadRanks(_runner_of(args, setting, is_real=is_real), setting.num_blocks)
        engine = ModelledEngine(name, args, ranks)
        await engine.process.start()
        pipe.send(await engine.process.invitation())
        await asyncio.to_thread(pipe.recv)
        pipe.send((ranks.measured, engine.num_ended))
        await engine.process.end()

    uvloop.run(serve())


def _front(pipe: Connection, invitations: Sequence[Invitation], policy: str, calls: Sequence[Call]) -> None:
    outcome = Outcome()

    async def ask(fleet: Fleet, call: Call, begin_s: float) -> None:
        await asyncio.sleep(begin_s + call.at_s - time.monotonic())
        began_s, first_s = time.monotonic(), 0.0
        params = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=call.output, ignore_eos=True)
        request = Request([call.tokens()], [params], terms=Terms(call.owner))
        (stream,) = await engine_of(fleet, None).submit(request)
        async for _ in stream:
            first_s = first_s or time.monotonic()
        outcome.note(call, began_s, first_s, time.monotonic(), stream.num_cached_tokens)
        await asyncio.gather(*(ask(fleet, later, time.monotonic()) for later in call.then))

    async def drive() -> None:
        fleet = Fleet(NODE, Callers(IngressArgs()), 60.0, routing=policy)
        for invitation in invitations:
            await fleet.meet(invitation)
        pipe.send(None)
        begin_s = await asyncio.to_thread(pipe.recv)
        await asyncio.gather(*(ask(fleet, call, begin_s) for call in calls))
        outcome.makespan = time.monotonic() - begin_s
        pipe.send(outcome)
        await fleet.stop()

    uvloop.run(drive())


@contextmanager
def _process(target: Any, *args: Any) -> Iterator[Connection]:
    """A process, and the pipe that is its first argument."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *args))
    process.start()
    try:
        yield ours
        process.join(30.0)
    finally:
        process.kill()


def live(calls: Sequence[Call], setting: Setting, ckpt_dir: str | None = None) -> tuple[Outcome, Steps]:
    """ckpt_dir: of real ranks, in place of paced ones. Also what each step took."""
    args = setting.engine_args(max(call.length for call in with_later(calls)))
    args = args.model_copy(update={"ckpt_dir": ckpt_dir} if ckpt_dir else {})
    with ExitStack() as stack:
        given = args, setting, ckpt_dir is not None
        engines = [stack.enter_context(_process(_engine, f"engine-{i}", *given)) for i in range(len(setting.speeds))]
        own = [pipe.recv() for pipe in engines], setting.policy
        parts = [calls[i :: setting.num_fronts] for i in range(setting.num_fronts)]
        fronts = [stack.enter_context(_process(_front, *own, part)) for part in parts]
        for pipe in fronts:
            pipe.recv()
        begin_s = time.monotonic() + LEAD_S
        for pipe in fronts:
            pipe.send(begin_s)
        outcomes: list[Outcome] = [pipe.recv() for pipe in fronts]
        for pipe in engines:
            pipe.send(None)
        told: list[tuple[Steps, int]] = [pipe.recv() for pipe in engines]
    whole = Outcome(makespan=max(part.makespan for part in outcomes), sequences=[number for _, number in told])
    for part, name in product(outcomes, ("ttft", "latency", "prompt_tokens", "cached_tokens", "output_tokens")):
        setattr(whole, name, getattr(whole, name) + getattr(part, name))
    return whole, [step for steps, _ in told for step in steps]


def fitted(steps: Steps) -> Costs:
    """Least squares of the relative errors of the measured steps."""
    table = np.array([(1.0, tokens, rows) for tokens, rows, _ in steps]) / np.array([[each[2]] for each in steps])
    found, *_ = np.linalg.lstsq(table, np.ones(len(steps)), rcond=None)
    return Costs(*(max(0.0, float(each)) for each in found))


def main(argv: Sequence[str]) -> None:
    parser = question_parser("validate", __doc__)
    add_workload_options(parser)
    add_fleet_options(parser)
    parser.add_argument("--policy", nargs="+", default=["expected_time"])
    parser.add_argument("--ckpt", metavar="DIR", help="real ranks with this checkpoint, of one thread each")
    parser.add_argument(
        "--given", action="store_true", help="simulate with the given costs, not those of the live steps"
    )
    options = parser.parse_args(argv)
    calls, rows = workload(options), []
    for policy in options.policy:
        setting = setting_of(options, policy)
        measured, steps = live(calls, setting, options.ckpt)
        costs = fitted(steps)
        simulated = run(calls, setting if options.given else replace(setting, costs=costs))
        row: list[Any] = [policy, len(setting.speeds), "/".join(f"{cost:.3g}" for cost in costs)]
        figures: list[Callable[[Outcome], float]] = [_throughput, partial(_ttft, 50), partial(_ttft, 99)]
        for figure in figures:
            row += [figure(measured), figure(simulated), figure(simulated) / figure(measured)]
        rows.append([*row, measured.cached_tokens, simulated.cached_tokens])
    names = [" ".join(pair) for pair in product(("tok/s", "TTFT p50", "TTFT p99"), ("live", "simulated", "ratio"))]
    title = f"{len(calls)} requests, {options.fronts} fronts; costs fitted to the live steps, in ms"
    print_table(title, ["policy", "engines", "costs", *names, "hits live", "hits simulated"], rows)
    emit("validate", {"rows": rows}, options)


def _throughput(outcome: Outcome) -> float:
    return outcome.output_tokens / outcome.makespan


def _ttft(percent: float, outcome: Outcome) -> float:
    return percentile(outcome.ttft, percent)
