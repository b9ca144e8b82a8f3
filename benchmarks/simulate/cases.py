"""Small traffic with a known right answer: does routing give it? In virtual time, or with --live over real sockets."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import median
from typing import Final

from benchmarks.harness.common import emit, percentile, print_table
from benchmarks.harness.options import question_parser
from benchmarks.simulate.generators import NAMES, mixed
from benchmarks.simulate.live import live
from benchmarks.simulate.run import POOLED, Outcome, Setting, Simulation, run
from benchmarks.simulate.workload import Call
from tests.support.modelled_fleet import Costs

OURS: Final = "expected_time"
COSTS: Final = Costs(40.0, 1.0, 2.0)
Run = Callable[[Sequence[Call], Setting], Outcome]


def setting(policy: str = OURS, *, engines: int = 4, rows: int = 32) -> Setting:
    return Setting(policy, COSTS, 1, [1.0] * engines, num_blocks=1500, block_size=16, max_batch_size=rows)


def in_turn(run: Run, seed: int) -> tuple[float, float]:
    """40 unshared requests, each after the end of the one before: at most 16 at one engine."""
    last: list[Call] = []
    for name in range(40):
        last = [Call(0.0, [(NAMES + 1000 * seed + name, 100)], 4, then=last)]
    return max(run(last, setting()).sequences), 16


def burst(seed: int) -> list[Call]:
    return [Call(i * 0.2 / 64, [(NAMES + 1000 * seed + i, 100)], 48) for i in range(64)]


def burst_spread(run: Run, seed: int) -> tuple[float, float]:
    """64 unshared requests in 0.2 s: at most 18 at one engine."""
    return max(run(burst(seed), setting()).sequences), 18


def burst_time(run: Run, seed: int) -> tuple[float, float]:
    """Their times to first token, 99th percentile: no more than those of round robin."""
    ours, other = (percentile(run(burst(seed), setting(policy)).ttft, 99) for policy in (OURS, "round_robin"))
    return ours, other


def behind(run: Run, seed: int) -> tuple[float, float]:
    """24 short requests 0.2 s after six prompts of 3,500 tokens, 90th percentile: 1.1 times what perfect placement gives."""
    first = NAMES + 1000 * seed
    long = [Call(0.0, [(first + i, 3500)], 4) for i in range(6)]
    short = [Call(0.2 + 0.001 * i, [(first + 10 + i, 50)], 4) for i in range(24)]
    found = [run([*long, *short], setting(policy)).ttft for policy in (OURS, POOLED)]
    ours, best = (percentile(sorted(each)[:24], 90) for each in found)
    return ours, 1.1 * best


def mean_mixed(run: Run, seed: int) -> tuple[float, float]:
    """75 s of mixed prefixes, 7 a second, mean time to first token: 0.8 times that of the least loaded engine."""
    calls = mixed(Random(seed), 7.0, 75.0)
    found = [run(calls, setting(policy)).ttft for policy in (OURS, "least_loaded")]
    ours, other = (sum(each) / len(each) for each in found)
    return ours, 0.8 * other


def joined(seed: int) -> tuple[float, float]:
    """48 requests at one engine of 8 rows, and three engines join after 1 s: ended in 1.3 times the time of four."""
    calls = [Call(0.001 * i, [(NAMES + 1000 * seed + i, 100)], 48) for i in range(48)]

    async def join(simulation: Simulation) -> None:
        await asyncio.sleep(1.0)
        for _ in range(3):
            await simulation.add_engine()

    found = run(calls, setting(engines=1, rows=8), join).makespan
    return found, 1.3 * run(calls, setting(rows=8)).makespan


CASES: Final[Mapping[str, Callable[[Run, int], tuple[float, float]]]] = {
    "in_turn": in_turn,
    "burst_spread": burst_spread,
    "burst_time": burst_time,
    "behind": behind,
    "mixed": mean_mixed,
}


def main(argv: Sequence[str]) -> None:
    parser = question_parser("cases", __doc__)
    parser.add_argument("--case", nargs="+", choices=[*CASES, "joined"], default=[*CASES, "joined"])
    parser.add_argument("--seeds", type=int, default=5, help="medians of so many")
    parser.add_argument(
        "--live", action="store_true", help="processes with paced ranks, but for `joined` and the oracle"
    )
    options = parser.parse_args(argv)

    def asked(calls: Sequence[Call], setting: Setting) -> Outcome:
        is_live = options.live and setting.policy != POOLED
        return live(calls, setting)[0] if is_live else run(calls, setting)

    found = {}
    for name in options.case:
        pairs = [joined(seed) if name == "joined" else CASES[name](asked, seed) for seed in range(1, options.seeds + 1)]
        found[name] = {"found": median(pair[0] for pair in pairs), "goal": median(pair[1] for pair in pairs)}
        print(name, found[name], flush=True)
    print_table("Medians", ["case", "found", "goal"], [[name, *each.values()] for name, each in found.items()])
    emit("cases", {"cases": found}, options)
