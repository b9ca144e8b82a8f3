"""Faults of a cluster under live streams: engines, nodes, ranks, connections, Serve's controller, scaling and upgrades.

python -m tests.chaos.cluster --faults 500 --streams 50 --json report.json
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from tests.chaos.from_outside import spread
from tests.chaos.load import KINDS as REQUESTS_OF_ONE_ENGINE
from tests.chaos.load import Streams, asks
from tests.chaos.nodes import MODEL, Nodes
from tests.support.main_thread import MainThread
from tests.support.ray_nodes import few_processes

REQUESTS: Final = (*REQUESTS_OF_ONE_ENGINE, "four choices")
SINGLE: Final = ("engine", "node", "rank", "cut", "stop", "slow")  # faults of one engine
KINDS: Final = (*SINGLE, "controller", "down", "upgrade", "upgrade_with_room", "front", "front_down")


@dataclass
class Fault:
    """What happened between two times of time.time(). is_alone: neither beside another fault nor beside the effects of one."""

    kind: str
    began: float
    settled: float
    is_alone: bool


async def strike(nodes: Nodes, main_thread: MainThread, options: argparse.Namespace) -> tuple[list[Fault], Streams]:
    """The faults, and the streams beside which they happened."""
    requests = asks(options.streams, MODEL, options.max_tokens, kinds=options.requests)
    streams = Streams(nodes.url, requests, options.streams, return_="front" in options.kinds)
    await streams.learn()
    streams.start()
    faults: list[Fault] = []
    is_settled, draw = True, nodes.draw
    rounds = [draw.sample(options.kinds, len(options.kinds)) for _ in range(options.faults)]
    for kind in list(chain(*rounds))[: options.faults]:
        await asyncio.sleep(draw.uniform(0.5, options.pause))
        settles = draw.random() >= options.overlap or len(faults) == options.faults - 1
        began = await main_thread.run(partial(nodes.strike, kind, settles=settles))
        faults.append(Fault(kind, began, time.time(), is_settled and settles))
        is_settled = settles
        print(f"{len(faults)} {kind}: {time.time() - began:.1f} s", file=sys.stderr, flush=True)
    await streams.stop()
    return faults, streams


def pauses(fault: Fault, streams: Streams, until: float) -> list[float]:
    """The longest time between two events of each stream that lived between the fault and `until`."""
    found = []
    for times in streams.times:
        if times and times[0] < until and fault.began < times[-1]:
            around = [
                after - before
                for before, after in pairwise(times)
                # A pause that began earlier is another fault's.
                if fault.began < after and fault.began - 0.5 < before < fault.settled
            ]
            found += [max(around)] if around else []
    return found


def summary(faults: Sequence[Fault], streams: Streams) -> dict[str, Any]:
    """Of faults that were alone, in seconds."""
    alone = [fault for fault in faults if fault.is_alone]
    longest = [max(pauses(fault, streams, fault.settled), default=0.0) for fault in alone]
    return {
        "settled": spread([fault.settled - fault.began for fault in alone]),
        "pauses of streams live at the fault": spread([s for f in alone for s in pauses(f, streams, f.began)]),
        "longest pause of a fault": spread(longest),
    }


def report(faults: list[Fault], streams: Streams) -> dict[str, Any]:
    kinds = Counter(fault.kind for fault in faults)
    return {
        "faults": len(faults),
        "kinds": dict(kinds),
        "answers": streams.num_answers,
        "endings": streams.endings(),
        "lost": len(streams.lost),
        "differing": len(streams.differing),
        "doubled": streams.num_doubled,
        "examples": (streams.lost + streams.differing)[:10],
        "single faults": summary([fault for fault in faults if fault.kind in SINGLE], streams),
    } | {kind: summary([fault for fault in faults if fault.kind == kind], streams) for kind in kinds}


def run(options: argparse.Namespace) -> dict[str, Any]:
    engine = {"model_parallel_size": options.ranks, "cpus_per_rank": 1 / options.ranks}  # a node has one CPU
    main_thread = MainThread()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name, few_processes():
        nodes = Nodes(
            Path(name), options.engines, random.Random(options.seed), max_batch_size=options.max_batch_size, **engine
        )
        try:
            with ThreadPoolExecutor(1) as pool:
                striking = pool.submit(asyncio.run, strike(nodes, main_thread, options))
                main_thread.serve_until(striking)
            return report(*striking.result())
        finally:
            if options.log:
                options.log.write_text(nodes.logs())
            nodes.end()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of an engine")
    parser.add_argument("--max-batch-size", type=int, default=128, help="of an engine; by default one has room for all")
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between faults at most")
    parser.add_argument(
        "--overlap", type=float, default=0.0, help="share of faults that the next one does not wait for"
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, "other_numerics"], help="of faults")
    parser.add_argument("--requests", nargs="+", default=list(REQUESTS), choices=list(REQUESTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="file for the logs of the replicas")
    options = parser.parse_args(arguments)
    result = run(options)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if result["lost"] or result["differing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
