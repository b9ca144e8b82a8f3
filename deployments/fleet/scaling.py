"""How many engines a model needs: policies for Serve's autoscaling, which calls them in its controller, several times a second.

Requests come from fronts, not through Serve, so Serve's own count of requests is 0: engines tell their load by
`record_autoscaling_stats`. Serve applies its delays, factors and limits to what a policy returns.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import ray
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

log = logging.getLogger("ray.serve")  # whose lines the controller writes to its file

# What an engine tells, since it told the last time or at that moment (`EngineClock`).
SEQUENCES: Final = "sequences"  # that run or wait there
BUSY: Final = "busy"  # share of what it could have computed in full batches
KV_USE: Final = "kv_use"  # share of the cache that sequences hold
QUEUED_MS: Final = "queued_ms"  # its time for the prompts that are queued there, and for sequences that have no slot
DELAY_S: Final = "delay_s"  # mean wait for the first token, without the prompt's own computation, of ended sequences
HELD: Final = "held"  # streams that fronts hold, of the whole model
HELD_MS: Final = "held_ms"  # its time for them

LONGEST_START_S: Final = 300.0  # what takes longer waits for a machine
RECORD_AGAIN_S: Final = 2.0  # Ray drops a series that is not recorded for a while


class Point(Protocol):
    timestamp: float
    value: float


Series = Sequence[Point]


class Signal(NamedTuple):
    """Of one model. offered: the work that arrives, in engines that do nothing else. backlog_s: of one engine, for what waits.
    delay_s: of the engine with the longest. most: engines that the sequences could keep busy. told: engines that have told."""

    offered: float
    backlog_s: float
    delay_s: float
    most: int
    told: int


class ExpectedTime:
    """So many engines that their work fills at most `utilization` of them, and that what waits is computed within `ttft_s`.

    A burst shorter than an engine's start adds no engine: the work is a mean over the time of the latest start, and a backlog
    has so long to shrink. While engines start, a backlog asks for no more. No engine is removed if the others would have more
    than `utilization` with its share, or make requests wait for longer than `ttft_s`, or before each engine has told its load;
    the last one goes when nothing has run or waited for `look_back_period_s`. More engines than sequences are no use.
    """

    def __init__(self, ttft_s: float = 2.0, utilization: float = 0.7) -> None:
        if not (ttft_s > 0 and 0 < utilization <= 1):
            raise ValueError("ttft_s must be positive, utilization above 0 and at most 1")
        self._ttft_s, self._utilization = ttft_s, utilization
        self._asked: tuple[float, int] | None = None  # when engines that are not there yet were asked for; engines then
        self._start_s = 0.0  # from then until all were there, the last time
        self._told: int | None = None  # the latest decision, until Serve has followed it
        self._gauges: Mapping[str, Gauge] = {}
        self._recorded_s = 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s = context.current_time or time.time()
        current, target = context.current_num_replicas, context.target_num_replicas
        self._note_start(now_s, current, is_starting=target > current)
        horizon_s = max(self._ttft_s, self._start_s)
        signal = signal_of(context.raw_metrics or {}, horizon_s)
        number = self._needed(signal, current, target, horizon_s)
        self._tell(context, signal, number, now_s)
        return number, {}

    def _note_start(self, now_s: float, current: int, *, is_starting: bool) -> None:
        if is_starting:
            self._asked = self._asked or (now_s, current)
        elif self._asked is not None:
            (asked_s, former), self._asked = self._asked, None
            if current > former:  # else they were asked for in vain
                self._start_s = min(now_s - asked_s, LONGEST_START_S)

    def _needed(self, signal: Signal, current: int, target: int, horizon_s: float) -> int:
        least = current if signal.told < current else 0
        for_backlog = signal.offered + signal.backlog_s / horizon_s
        needed = max(signal.offered / self._utilization, min(for_backlog, target) if target > current else for_backlog)
        # Fewer engines make requests wait longer, in proportion.
        late = min(current, math.ceil(current * signal.delay_s / self._ttft_s))
        needed = max(math.ceil(needed), late, 1 if signal.most else 0)
        return max(least, min(needed, signal.most))

    def _tell(self, context: AutoscalingContext, signal: Signal, number: int, now_s: float) -> None:
        """One line for each decision, and metrics."""
        target, current = context.target_num_replicas, context.current_num_replicas
        most, least = context.capacity_adjusted_max_replicas, context.capacity_adjusted_min_replicas
        decision = max(least, min(most, number))
        if decision not in (target, self._told):
            log.info(
                f"scaling {context.app_name}: {number} engines are needed, {target} asked for, {current} there; "
                f"work of {signal.offered:.2f} engines, backlog {signal.backlog_s:.1f} s of one, delay {signal.delay_s:.2f} s"
            )
        self._told = None if decision == target else decision
        if now_s - self._recorded_s >= RECORD_AGAIN_S and ray.is_initialized():
            self._recorded_s = now_s
            self._gauges = self._gauges or gauges()
            values = signal.offered, signal.backlog_s, signal.delay_s, number, target, current
            for gauge, value in zip(self._gauges.values(), values, strict=True):
                gauge.set(value, {"application": context.app_name or ""})


def gauges() -> Mapping[str, Gauge]:
    """By name, in Ray's metrics."""
    texts = {
        "llama_scaling_offered": "Work that arrives, in engines that do nothing else",
        "llama_scaling_backlog_seconds": "Time of one engine for what waits",
        "llama_scaling_delay_seconds": "Longest of the engines' mean waits before the first token",
        "llama_scaling_engines_needed": "Engines that the policy finds needed, before Serve's delays and limits",
        "llama_scaling_engines_asked": "Engines that Serve is to run",
        "llama_scaling_engines_there": "Engines that run",
    }
    return {name: Gauge(name, text, ("application",)) for name, text in texts.items()}


def signal_of(metrics: Mapping[str, Mapping[Any, Series]], window_s: float) -> Signal:
    """metrics: series of what each engine has told, by name and engine. window_s: over which work is averaged, of all engines
    together: one that has come meanwhile had no work before."""
    engines = metrics.get(BUSY, {})

    def of_each(name: str) -> list[Series]:
        return [series for engine in engines if (series := metrics.get(name, {}).get(engine))]

    busy, queued_ms, held, held_ms = of_each(BUSY), of_each(QUEUED_MS), of_each(HELD), of_each(HELD_MS)
    held_ms = [max(held_ms, key=_last)] if held_ms else []  # all tell the same, at other moments
    sequences = sum(map(_peak, of_each(SEQUENCES))) + max(map(_peak, held), default=0.0)
    is_used = sequences > 0 or any(map(_peak, busy))
    growth = (_growth(queued_ms, window_s) + _growth(held_ms, window_s)) / 1e3
    used = sum(map(_last, of_each(KV_USE)))
    return Signal(
        offered=max(0.0, used, _mean(busy, window_s) + growth) if is_used else 0.0,
        backlog_s=sum(map(_last, [*queued_ms, *held_ms])) / 1e3,
        delay_s=max(map(_last, of_each(DELAY_S)), default=0.0),
        most=max(1, math.ceil(sequences)) if is_used else 0,
        told=len(engines),
    )


def _num_points(each: Sequence[Series], window_s: float) -> int:
    """Of the longest series, within the window: at least one."""
    return max(
        (sum(point.timestamp > series[-1].timestamp - window_s for point in series) for series in each), default=1
    )


def _mean(each: Sequence[Series], window_s: float) -> float:
    """Of the sum of all."""
    num = _num_points(each, window_s)
    return sum(point.value for series in each for point in series[-num:]) / num


def _growth(each: Sequence[Series], window_s: float) -> float:
    """Of the sum of all, a second. A series that begins later than others has begun with 0."""
    points = [series[-1 - _num_points(each, window_s) :] for series in each]
    longest = max(points, key=len, default=())
    if len(longest) < 2:
        return 0.0
    before = sum(series[0].value for series in points if len(series) >= len(longest) - 1)
    return (sum(map(_last, points)) - before) / (longest[-1].timestamp - longest[0].timestamp)


def _last(series: Series) -> float:
    return series[-1].value


def _peak(series: Series) -> float:
    return max(point.value for point in series)


def by_sequences(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """So many engines that each has `target_ongoing_requests` sequences, and no fewer than now while an engine has not told
    its own."""
    sequences = (context.aggregated_metrics or {}).get(SEQUENCES, {})
    target: float = context.config.target_ongoing_requests  # type: ignore[union-attr]
    least = context.current_num_replicas if len(sequences) < context.current_num_replicas else 0
    return max(least, math.ceil(sum(sequences.values()) / target)), {}
