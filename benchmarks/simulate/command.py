"""How would a fleet serve this traffic? Real schedulers, fronts and policies over ranks that are a model of costs."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.common import emit, print_table
from benchmarks.harness.options import question_parser
from benchmarks.simulate.fleet import Costs
from benchmarks.simulate.run import POOLED, Setting, run
from benchmarks.simulate.traces import mooncake
from benchmarks.simulate.workload import Call, all_calls
from deployments.fleet.routing import POLICIES

COLUMNS = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "latency_mean_s", "makespan_s", "hit_share", "sequences", "wall_s")


def scaled(calls: Sequence[Call], factor: float) -> list[Call]:
    """Arrivals `factor` times as far apart."""
    return [replace(call, at_s=call.at_s * factor) for call in calls]


def gaps(found: Mapping[str, Mapping[str, Any]], figure: str) -> dict[str, float]:
    """Of the gap between power of two and perfect placement, the share that each policy closes."""
    low, high = found[POOLED][figure], found["power_of_two"][figure]
    return {name: (high - each[figure]) / (high - low) for name, each in found.items()}


def main(argv: Sequence[str]) -> None:
    names = [*POLICIES, POOLED]
    parser = question_parser("simulate", __doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--block", type=int, default=512, help="tokens of a trace's block; 16 scales its lengths down by 32")
    parser.add_argument("--spread", action="store_true", help="arrivals of equal times evenly until the next time")
    parser.add_argument("--requests", type=int, help="the first so many")
    parser.add_argument("--policy", nargs="+", choices=names, default=names)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--speeds", type=float, nargs="+", help="of each engine, in place of --engines")
    parser.add_argument("--blocks", type=int, default=1000, help="cache blocks of an engine")
    parser.add_argument("--block-size", type=int, help="of an engine; as --block if absent")
    parser.add_argument("--rows", type=int, default=64, help="max_batch_size")
    parser.add_argument("--costs", type=float, nargs=3, default=(10.0, 0.08, 0.2), metavar=("BASE", "TOKEN", "ROW"), help="ms")
    parser.add_argument("--saturated", action="store_true", help="all arrive at once")
    parser.add_argument("--load", type=float, help="share of the capacity, that of perfect placement at saturation")
    parser.add_argument("--capacity", type=float, help="requests a second, if it is known")
    options = parser.parse_args(argv)
    calls = mooncake(options.trace, options.block, spreads=options.spread)[: options.requests]
    longest = max(call.prompt_tokens + call.output for call in all_calls(calls))
    setting = Setting(
        Costs(*options.costs),
        options.fronts,
        options.speeds or [1.0] * options.engines,
        options.blocks,
        options.block_size or options.block,
        options.rows,
    )
    span_s = calls[-1].at_s - calls[0].at_s
    capacity = options.capacity
    if options.load and not capacity:
        capacity = len(calls) / run(scaled(calls, 0.0), setting, POOLED, longest).makespan
        print(f"capacity {capacity:.3f} requests/s")
    factor = 0.0 if options.saturated else 1.0 if not options.load else len(calls) / span_s / (capacity * options.load)
    found: dict[str, dict[str, Any]] = {}
    for policy in options.policy:
        found[policy] = run(scaled(calls, factor), setting, policy, longest).figures()
        print(json.dumps({policy: found[policy]}), flush=True)
    closed: dict[str, Any] = {}
    if POOLED in found and "power_of_two" in found:
        closed = {"ttft": gaps(found, "ttft_mean_s"), "makespan": gaps(found, "makespan_s")}
    rows = [
        [name, *(each[column] if column != "sequences" else "/".join(map(str, each[column])) for column in COLUMNS),
         *(f"{closed[one][name]:.2f}" if closed else "-" for one in ("ttft", "makespan"))]
        for name, each in found.items()
    ]
    print_table(f"{len(calls)} requests, {len(setting.speeds)} engines, {options.fronts} fronts, arrivals x{factor:.3f}",
                ["policy", *COLUMNS, "gap ttft", "gap makespan"], rows)
    emit("simulate", {"capacity": capacity, "factor": factor, "policies": found, "gap_closed": closed}, options)


