"""How would a fleet serve this traffic? Real fronts, policies and schedulers over ranks that are a model of costs."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.harness.common import emit, percentile, print_table
from benchmarks.harness.options import question_parser
from benchmarks.simulate.generators import GENERATORS
from benchmarks.simulate.run import CHOOSERS, POOLED, Setting, run
from benchmarks.simulate.traces import TRACE_BLOCK, read
from benchmarks.simulate.workload import Call, with_later
from deployments.fleet.routing import POLICIES
from tests.support.modelled_fleet import Costs

MOST_ENGINES: Final = 256
TIMES: Final = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "latency_mean_s", "makespan_s", "hit_share")


def scaled(calls: Sequence[Call], factor: float) -> list[Call]:
    """Arrivals `factor` times as far apart."""
    return [replace(call, at_s=call.at_s * factor) for call in calls]


def gaps(found: Mapping[str, Mapping[str, Any]], figure: str) -> dict[str, float]:
    """Of the gap between power of two and perfect placement, the share that each policy closes."""
    if not {POOLED, "power_of_two"} <= found.keys():
        return {}
    low, high = found[POOLED][figure], found["power_of_two"][figure]
    return {name: (high - each[figure]) / (high - low or 1e-9) for name, each in found.items()}


def engines_for(calls: Sequence[Call], setting: Setting, ttft_s: float, percent: float) -> int:
    """How many engines give that percentile of the times to first token; doubles the number, then halves the interval."""

    def suffice(number: int) -> bool:
        return percentile(run(calls, replace(setting, speeds=[1.0] * number)).ttft, percent) <= ttft_s

    low, high = 0, 1
    while not suffice(high):
        low, high = high, 2 * high
        if high > MOST_ENGINES:
            raise SystemExit(f"{low} engines do not suffice")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffice(middle) else (middle, high)
    return high


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", help=f"the file of a published trace, or one of {', '.join(GENERATORS)}")
    parser.add_argument("--block", type=int, default=TRACE_BLOCK, help=f"tokens for {TRACE_BLOCK} of a trace's prompts")
    parser.add_argument("--spread", action="store_true", help="a trace's arrivals of one time evenly until the next")
    parser.add_argument("--requests", type=int, help="a trace's first ones")
    parser.add_argument("--rate", type=float, help="sessions, groups or requests a second; if absent, a trace's, or 2")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a generator")
    parser.add_argument("--seed", type=int, default=1, help="of a generator")


def workload(options: argparse.Namespace) -> list[Call]:
    if options.workload in GENERATORS:
        return GENERATORS[options.workload](Random(options.seed), options.rate or 2.0, options.seconds)
    calls = read(Path(options.workload), options.block, spreads=options.spread)[: options.requests]
    return scaled(calls, rate_of(calls) / options.rate) if options.rate else calls


def rate_of(calls: Sequence[Call]) -> float:
    """Requests a second, as if those that follow others came with them."""
    return len(with_later(calls)) / (calls[-1].at_s or 1.0)


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    names, text = ("BASE", "TOKEN", "ROW"), "ms of a step, of a prompt's token and of a decode row in it"
    group.add_argument("--costs", type=float, nargs=3, default=(10.0, 0.08, 0.2), metavar=names, help=text)
    group.add_argument("--engines", type=int, default=4)
    group.add_argument("--speeds", type=float, nargs="+", help="of each engine; 2 halves its costs")
    group.add_argument("--fronts", type=int, default=1)
    group.add_argument("--blocks", type=int, default=1000, help="of an engine's cache")
    group.add_argument("--block-size", type=int, default=TRACE_BLOCK, help="tokens of such a block")
    group.add_argument("--rows", type=int, default=64, help="sequences that run at once: max_batch_size")


def setting_of(options: argparse.Namespace, policy: str, engines: int = 0) -> Setting:
    """engines: in place of those of the options."""
    costs, speeds = Costs(*options.costs), [1.0] * engines or options.speeds or [1.0] * options.engines
    return Setting(policy, costs, options.fronts, speeds, options.blocks, options.block_size, options.rows)


def main(argv: Sequence[str]) -> None:
    parser = question_parser("simulate", __doc__)
    add_workload_options(parser)
    add_fleet_options(parser)
    names = [*POLICIES, *CHOOSERS]
    parser.add_argument("--policy", nargs="+", choices=names, default=[*POLICIES, POOLED])
    parser.add_argument("--saturated", action="store_true", help="all requests come at once")
    parser.add_argument("--load", type=float, help="share of the requests a second of perfect placement at saturation")
    parser.add_argument("--capacity", type=float, help="these, where they are known")
    parser.add_argument("--ttft-ms", type=float, help="how many engines does each policy need for it?")
    parser.add_argument("--percentile", type=float, default=99.0, help="of --ttft-ms")
    options = parser.parse_args(argv)
    calls, capacity = workload(options), options.capacity
    if options.load and not capacity:
        capacity = len(with_later(calls)) / run(scaled(calls, 0.0), setting_of(options, POOLED)).makespan
    if options.saturated or options.load:
        calls = scaled(calls, 0.0 if options.saturated else rate_of(calls) / capacity / options.load)
    settings = {name: setting_of(options, name) for name in options.policy}
    if options.ttft_ms:
        target = options.ttft_ms / 1e3, options.percentile
        needed = {name: engines_for(calls, setting, *target) for name, setting in settings.items()}
        print_table(f"For a TTFT of {options.ttft_ms:g} ms", ["policy", "engines"], [*map(list, needed.items())])
        emit("simulate", {"engines": needed}, options)
    else:
        found = {name: run(calls, setting).figures() for name, setting in settings.items()}
        print_times(f"{len(with_later(calls))} requests, {options.fronts} fronts", found)
        emit("simulate", {"capacity": capacity, "gap_closed": closed_by(found), "policies": found}, options)


def closed_by(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    return {figure: gaps(found, figure) for figure in ("ttft_mean_s", "makespan_s")}


def print_times(title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    rows: list[list[str | float]] = []
    for name, each in found.items():
        closed = [gap.get(name, "-") for gap in closed_by(found).values()]
        rows.append([name, *(each[time] for time in TIMES), "/".join(map(str, each["sequences"])), *closed])
    head = ["policy", *TIMES, "sequences", "TTFT gap closed", "makespan gap closed"]
    print_table(f"{title}; gap: share of that from power_of_two to {POOLED}", head, rows)
