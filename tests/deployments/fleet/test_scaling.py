"""The policies of `scaling.py`, as tables of what engines tell and how many engines follow."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engine.step_report import StepStats
from deployments.fleet.engine_clock import EngineClock
from deployments.fleet.scaling import BUSY, DELAY_S, HELD, HELD_MS, KV_USE, QUEUED_MS, SEQUENCES, ExpectedTime
from deployments.links import messages
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step_costs import StepShape
from tests.support.fleets import FleetOfEngines, seeded

QUIET = {BUSY: 0.0, KV_USE: 0.0, QUEUED_MS: 0.0, DELAY_S: 0.0, HELD: 0.0, HELD_MS: 0.0, SEQUENCES: 0.0}


def engine(busy: float = 0.5, **values: float) -> dict[str, float]:
    """What one engine tells, of many sequences."""
    return QUIET | {BUSY: busy, SEQUENCES: 20.0} | values


class Controller:
    """Calls the policy after reports that come every 2 s. `current` and `target` are as the test sets them."""

    def __init__(self, policy: ExpectedTime, current: int = 1) -> None:
        self.policy, self.current, self.target, self.now_s = policy, current, current, 1000.0
        self.series: dict[str, dict[str, list[Any]]] = {}

    def told(self, *engines: dict[str, float]) -> int:
        self.now_s += 2
        for at, values in enumerate(engines):
            for name, value in values.items():
                series = self.series.setdefault(name, {}).setdefault(f"engine {at}", [])
                series.append(SimpleNamespace(timestamp=self.now_s, value=value))
                del series[: -len([point for point in series if point.timestamp > self.now_s - 30])]
        context: Any = SimpleNamespace(
            app_name="demo",
            raw_metrics={name: dict(list(each.items())[: len(engines)]) for name, each in self.series.items()},
            current_num_replicas=self.current,
            target_num_replicas=self.target,
            current_time=self.now_s,
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=4,
            config=SimpleNamespace(look_back_period_s=30.0),
        )
        number, state = self.policy(context)
        assert state == {}
        return number


@pytest.mark.parametrize(
    ("engines", "number"),
    [
        ([engine(0.0, sequences=0.0)], 0),  # nothing runs or waits, and nothing has
        ([engine(0.01, sequences=0.0)], 1),  # requests that begin and end between two reports
        ([engine(0.0, sequences=1.0)], 1),
        ([engine(0.7)], 1),
        ([engine(0.8)], 2),
        ([engine(0.9), engine(0.9)], 3),
        ([engine(0.2, kv_use=0.9)], 2),  # the cache is full before the ranks are busy
        ([engine(1.0, queued_ms=12_000.0)], 7),  # six engines have 2 s each for what waits
        ([engine(1.0, held=30.0, held_ms=12_000.0)], 7),
        ([engine(0.5, held=9.0, held_ms=4000.0), engine(0.5, held=9.0, held_ms=4000.0)], 3),  # the same streams
        ([engine(1.0, queued_ms=12_000.0, sequences=2.0)], 2),  # two prompts, however long, keep two engines busy
        ([engine(0.3, delay_s=1.2), engine(0.3)], 2),  # one engine would make requests wait for 2.4 s
        ([engine(0.3, delay_s=0.9), engine(0.3)], 1),
        ([engine(0.3), engine(0.3, delay_s=60.0)], 2),  # a delay alone asks for no more engines than there are
    ],
)
def test_engines_are_as_many_as_work_backlog_and_cache_need(engines: list[dict[str, float]], number: int) -> None:
    controller = Controller(ExpectedTime(ttft_s=2.0, utilization=0.7), len(engines))
    controller.told(*engines)
    controller.target = 0  # so that the last reports alone decide
    assert controller.told(*engines) == number


def test_an_engine_that_has_told_nothing_is_kept() -> None:
    controller = Controller(ExpectedTime(), current=3)
    assert controller.told(engine(0.1)) == 3


def test_the_work_that_arrives_is_known_while_one_engine_is_full() -> None:
    """Its backlog grows by two seconds a second."""
    controller = Controller(ExpectedTime(ttft_s=4.0, utilization=0.75))
    controller.told(engine(1.0, queued_ms=0.0))
    controller.told(engine(1.0, queued_ms=4000.0))
    assert controller.told(engine(1.0, queued_ms=8000.0)) == 5  # 3 of work and 2 for the backlog, or 3 / 0.75


def test_constant_load_makes_one_decision_while_engines_start_and_when_they_have_started() -> None:
    controller = Controller(ExpectedTime(ttft_s=2.0, utilization=0.75))
    controller.told(engine(1.0, queued_ms=0.0))
    controller.target = controller.told(engine(1.0, queued_ms=4000.0))
    assert controller.target == 5
    for second in range(4, 42, 2):  # they start
        assert controller.told(engine(1.0, queued_ms=2000.0 * second)) == 5
    controller.current = 5
    left_ms = 80_000.0
    while left_ms > 0:  # of 5 engines, 3 do what arrives
        left_ms = max(0.0, left_ms - 4000.0)
        assert controller.told(*[engine(1.0 if left_ms else 0.6, queued_ms=left_ms / 5)] * 5) <= 5
    for _ in range(30):
        assert controller.told(*[engine(0.6)] * 5) <= 5


def test_a_burst_that_ends_before_an_engine_could_start_asks_for_none() -> None:
    controller = Controller(ExpectedTime(ttft_s=2.0))
    controller.target = 2
    controller.told(engine(0.5))
    for _ in range(15):
        controller.told(engine(0.5))
    controller.current = 2  # after 30 s
    controller.told(engine(0.3), engine(0.3))
    controller.current = controller.target = 1
    for _ in range(15):
        controller.told(engine(0.3))
    assert controller.told(engine(0.3, queued_ms=6000.0)) == 1


def test_an_engine_is_removed_only_if_the_others_have_room() -> None:
    controller = Controller(ExpectedTime(utilization=0.7), current=2)
    assert controller.told(engine(0.36), engine(0.36)) == 2
    assert controller.told(engine(0.34), engine(0.34)) == 1


def test_a_model_sleeps_when_nothing_has_run_or_waited_for_the_look_back_period() -> None:
    controller = Controller(ExpectedTime())
    controller.told(engine(0.05, sequences=1.0))
    for _ in range(14):
        assert controller.told(QUIET) == 1
    assert controller.told(QUIET) == 0


def test_each_decision_is_a_line_and_what_the_limits_prevent_is_none(caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(ExpectedTime(ttft_s=2.0), current=4)
    with caplog.at_level("INFO", logger="ray.serve"):
        controller.told(*[engine(1.0, queued_ms=9000.0)] * 4)
        assert not caplog.messages
        controller.target = 1
        controller.told(*[engine(1.0, queued_ms=9000.0)] * 4)
        controller.told(*[engine(1.0, queued_ms=9900.0)] * 4)
    (line,) = caplog.messages
    assert (
        line.startswith("scaling demo: ")
        and "1 asked for, 4 there; work of 4.00 engines, backlog 36.0 s of one" in line
    )


@pytest.mark.parametrize("arguments", [{"ttft_s": 0}, {"utilization": 0}, {"utilization": 1.5}])
def test_arguments_without_a_meaning_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="ttft_s must be positive"):
        ExpectedTime(**arguments)


async def test_an_engine_tells_its_work_what_waits_and_what_fronts_hold() -> None:
    """One stream of a batch of 8 keeps the ranks at work all the time, and the engine is far from full."""
    async with FleetOfEngines(seeded) as fleet:
        engine = await fleet.start(max_batch_size=8)
        clock, loop = EngineClock(), engine.service.loop
        costs = loop._pacing.costs
        costs.observe(StepShape(1, 0, 0), 10.0)
        costs.observe(StepShape(0, 100, 0), 100.0)
        for _ in range(10):
            clock.on_step(step(elapsed_ms=10.0, num_sampled=1))
        await asyncio.sleep(0.1)
        stats = clock.read(loop, 3, 500)
        assert 0 < stats[BUSY] <= 1 / 8
        assert (stats[HELD], stats[HELD_MS], stats[SEQUENCES], stats[QUEUED_MS]) == (3, 450.0, 0, 0.0)
        clock.on_step(step(elapsed_ms=70.0, num_computed=70))
        await asyncio.sleep(0.1)
        assert 0.3 < clock.read(loop, 0, 0)[BUSY] <= 0.7
        stats = clock.read(loop, 0, 0)
        assert stats[BUSY] == 0 and all(isinstance(value, int | float) for value in stats.values())


async def test_fronts_tell_engines_what_they_hold_and_each_engine_tells_the_sum() -> None:
    async with FleetOfEngines(seeded) as fleet:
        engine = await fleet.start()
        (stream,) = await fleet.submit(list(range(3, 60)), SamplingParams(max_tokens=400))
        assert (await engine.engine.record_autoscaling_stats())[SEQUENCES] == 1
        stream.cancel()
        assert engine.server is not None
        (session,) = engine.server.sessions
        session.take(messages.Alive(2, 300))
        assert engine.server.held == (2, 300)
        assert (await engine.engine.record_autoscaling_stats())[HELD] == 2


def step(elapsed_ms: float, num_sampled: int = 0, num_computed: int = 0) -> StepStats:
    return StepStats(1, 1, num_sampled, elapsed_ms, is_decode=num_sampled > 0, num_computed=num_computed)


def test_a_start_that_waited_for_a_machine_does_not_blunt_later_decisions() -> None:
    controller = Controller(ExpectedTime(ttft_s=2.0, utilization=0.7))
    controller.target = 2
    for _ in range(3600):  # two hours
        controller.told(engine(0.5))
    controller.current = 2
    controller.told(engine(0.5), engine(0.5))
    controller.current = controller.target = 1
    for _ in range(200):
        needed = controller.told(engine(1.0, queued_ms=600_000.0))
    assert needed >= 3
