"""What do policies for autoscaling cost in engines and in late first tokens? In virtual time, with Serve's own delays."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentID,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig

from benchmarks.harness.common import emit, print_table
from benchmarks.harness.options import question_parser
from benchmarks.simulate.command import add_fleet_options, add_workload_options, setting_of, workload
from benchmarks.simulate.run import Simulation, run
from benchmarks.simulate.workload import with_later
from tests.support.modelled_fleet import ModelledEngine

LOOP_S: Final = 0.5  # between two decisions; Serve's own loop takes a tenth of a second
PUSH_S: Final = 2.0  # as metrics_interval_s in rayservice.yaml
ENGINE: Final = DeploymentID("LlamaEngine", "llama")
OURS: Final = "deployments.fleet.scaling"
POLICIES: Final = ("expected_time", "by_sequences", "serve_default")


class Autoscaler:
    """The controller's part of Serve, for the engines of one simulation. decisions: when the target changed, and to what."""

    def __init__(self, config: AutoscalingConfig, start_s: float) -> None:
        self._config, self._start_s = config, start_s
        self._state = DeploymentAutoscalingState(ENGINE)
        own = SimpleNamespace(autoscaling_config=config, gang_scheduling_config=None)
        info = SimpleNamespace(deployment_config=own, target_capacity=None, target_capacity_direction=None)
        self._target = self._state.register(cast(DeploymentInfo, info), config.min_replicas)
        self._engines: dict[ModelledEngine, float] = {}  # those that serve, and since when they cost
        self._starting: list[asyncio.Task[None]] = []
        self._series: dict[ModelledEngine, dict[str, list[TimeStampedValue]]] = {}
        self.decisions: list[tuple[float, int]] = []

    async def run(self, simulation: Simulation) -> None:
        self._simulation, next_s = simulation, time.time()
        self._engines = dict.fromkeys(simulation.engines, next_s)
        try:
            while True:
                if time.time() >= next_s:
                    next_s += PUSH_S
                    await self._push()
                self._decide()
                await asyncio.sleep(LOOP_S)
        finally:
            for began_s in self._engines.values():
                self._simulation.outcome.engine_s += time.time() - began_s

    async def _push(self) -> None:
        now_s, period_s = time.time(), self._config.look_back_period_s
        for engine in self._engines:
            stats = await engine.process.record_autoscaling_stats() | {RUNNING_REQUESTS_KEY: engine.num_sequences}
            series = self._series.setdefault(engine, {})
            for name, value in stats.items():
                recent = [each for each in series.get(name, []) if each.timestamp >= now_s - period_s]
                series[name] = [*recent, TimeStampedValue(now_s, value)]
            self._state.record_request_metrics_for_replica(ReplicaMetricReport(_id(engine), dict(series), now_s))

    def _decide(self) -> None:
        self._state.update_running_replica_ids([*map(_id, self._engines)])
        target = self._state.get_decision_num_replicas(self._target)
        if target != self._target:
            self.decisions.append((time.time(), target))
            self._target = target
        self._starting = [task for task in self._starting if not task.done()]
        while len(self._engines) + len(self._starting) < target:
            self._starting.append(asyncio.get_running_loop().create_task(self._start()))
        while self._starting and len(self._engines) + len(self._starting) > target:
            self._starting.pop().cancel()
        while len(self._engines) > target:
            asyncio.get_running_loop().create_task(self._end(*self._engines.popitem()))

    async def _start(self) -> None:
        began_s = time.time()
        try:
            await asyncio.sleep(self._start_s)
            engine = await self._simulation.add_engine()
        except asyncio.CancelledError:
            self._simulation.outcome.engine_s += time.time() - began_s
            raise
        self._engines[engine] = began_s

    async def _end(self, engine: ModelledEngine, began_s: float) -> None:
        self._state.on_replica_stopped(_id(engine))
        await engine.end()
        self._simulation.outcome.engine_s += time.time() - began_s


def _id(engine: ModelledEngine) -> ReplicaID:
    return ReplicaID(engine.name, ENGINE)


def policy_of(name: str, knob: float, ttft_s: float) -> dict[str, Any]:
    """Of `AutoscalingConfig`. knob: the utilization of ours, or the sequences of an engine."""
    if name == "expected_time":
        kwargs = {"ttft_s": ttft_s, "utilization": knob}
        return {"policy": {"policy_function": f"{OURS}:ExpectedTime", "policy_kwargs": kwargs}}
    own = {"target_ongoing_requests": knob}
    return own if name == "serve_default" else own | {"policy": {"policy_function": f"{OURS}:{name}"}}


def misses_at(engine_s: float, points: Sequence[tuple[float, float]]) -> float:
    """Between the measured (engine seconds, share of misses), in a straight line; of the nearest beyond them."""
    ordered = sorted(points)
    place = bisect_left(ordered, (engine_s, 0.0))
    if place in (0, len(ordered)):
        return ordered[max(0, place - 1)][1]
    (low_s, low), (high_s, high) = ordered[place - 1], ordered[place]
    return low + (high - low) * (engine_s - low_s) / (high_s - low_s)


def main(argv: Sequence[str]) -> None:
    parser = question_parser("autoscale", __doc__)
    add_workload_options(parser)
    add_fleet_options(parser)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--start-s", type=float, default=5.0, help="from the decision until an engine serves")
    parser.add_argument("--ttft-ms", type=float, default=2000.0, help="a first token that comes later is a miss")
    parser.add_argument("--most", type=int, default=16, help="engines")
    parser.add_argument("--utilization", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--sequences", type=float, nargs="+", default=[2, 4, 8, 16, 32], help="for the others")
    parser.add_argument("--delays", type=float, nargs=2, default=[30.0, 600.0], help="Serve's up and down, in s")
    options = parser.parse_args(argv)
    calls, target_s, rows = workload(options), options.ttft_ms / 1e3, []
    found: dict[str, list[tuple[float, float]]] = {}
    for name in options.policy:
        for knob in options.utilization if name == "expected_time" else options.sequences:
            limits = {"min_replicas": 1, "max_replicas": options.most, "look_back_period_s": 30.0}
            delays = dict(zip(("upscale_delay_s", "downscale_delay_s"), options.delays, strict=True))
            config = AutoscalingConfig(**limits, **delays, **policy_of(name, knob, target_s))
            scaler = Autoscaler(config, options.start_s)
            outcome = run(calls, setting_of(options, "expected_time", 1), scaler.run)
            late = sum(ttft > target_s for ttft in outcome.ttft) / len(outcome.ttft)
            most = max((number for _, number in scaler.decisions), default=1)
            found.setdefault(name, []).append((outcome.engine_s, late))
            rows.append([name, knob, outcome.engine_s, late, len(scaler.decisions), most, outcome.failed])
            print(*rows[-1], f"{outcome.wall:.1f} s", flush=True)
    print_table(
        f"{len(with_later(calls))} requests, starts of {options.start_s:g} s, target {target_s:g} s",
        ["policy", "knob", "engine seconds", "misses", "decisions", "most engines", "failed"],
        rows,
    )
    ours = found.get("expected_time", [])
    ratios = {name: [late / (misses_at(spent, each) or 1e-9) for spent, late in ours] for name, each in found.items()}
    emit("autoscale", {"rows": rows, "misses of expected_time against": ratios}, options)
