"""Faults of a cluster under live streams: engines, nodes, ranks, connections, Serve's controller, scaling and upgrades.

python -m tests.chaos.cluster --faults 500 --streams 50 --json report.json
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import psutil
from ray.exceptions import RayError

from deployments.args import resolve
from tests.chaos.asks import KINDS as REQUESTS_OF_ONE_ENGINE
from tests.chaos.asks import Ask, asks
from tests.chaos.from_outside import spread
from tests.chaos.load import Streams
from tests.chaos.nodes import LOADED, MODEL, SECOND, Nodes
from tests.support import adapters
from tests.support.ray_nodes import MainThread, few_processes
from tests.support.waiting import until_true

REQUESTS: Final = (*REQUESTS_OF_ONE_ENGINE, "four choices", "adapter")
SHORT: Final = ("stop", "whole", "tool call", "cut")  # kinds of requests that cannot be read slowly
ADAPTERS: Final = ("all", "stabilized", "patterns")
NAMES: Final = (*ADAPTERS, LOADED)
MAX_LORAS: Final = 2  # of an engine: an adapter replaces another one, or waits
SLOW_STREAMS: Final = 0.1  # share of --num-streams, at least, where clients are slow
SINGLE: Final = ("engine", "node", "rank", "cut", "stop")  # faults of one engine
UPDATES: Final = ("down", "upgrade", "upgrade_with_room", "front_down", "template", "adapter")
KINDS: Final = (*SINGLE, "front", *UPDATES, "controller")
LULL: Final = "lull"  # needs --scales


@dataclass
class Fault:
    """What happened between two times of time.time(). is_alone: neither beside another fault nor beside the effects of one."""

    kind: str
    began: float
    settled: float
    is_alone: bool


@dataclass
class Course:
    streams: Streams
    slow: Streams
    faults: list[Fault] = field(default_factory=list)

    async def answered(self, count: float) -> None:
        """Wait for so many answers."""
        num_slow = SLOW_STREAMS * count if self.slow.num_clients else 0.0

        def is_reached() -> bool:
            return self.streams.num_answers + self.slow.num_answers >= count and self.slow.num_slow >= num_slow

        await until_true(f"{count:g} streams are answered", is_reached, 3600.0)


async def strike(nodes: Nodes, main_thread: MainThread, options: argparse.Namespace) -> Course:
    returns, kinds = "front" in options.kinds, options.requests  # the clients of a front that ends come back
    num_slow = round(options.slow * options.streams)
    num_fast = options.streams - num_slow
    requests = asks(max(num_fast, 3 * len(kinds)), MODEL, options.max_tokens, kinds=kinds, adapters=NAMES)
    streams = Streams(nodes.url, of_both_models(requests), num_fast, returns=returns, unasked=nodes.unasked)
    kinds = [kind for kind in kinds if kind not in SHORT]
    requests = asks(min(num_slow, 2 * len(kinds)), MODEL, options.slow_tokens, 1, kinds, NAMES)
    slow = Streams(
        nodes.url,
        of_both_models(requests),
        num_slow,
        returns=returns,
        lasts_s=options.slow_s,
        unasked=nodes.unasked,
    )
    if "adapter" in kinds:
        await main_thread.run(nodes.load_adapter)
    course = Course(streams, slow)
    for each in (streams, slow):
        await each.learn(MODEL)
    for each in (streams, slow):
        each.start()
    faults = course.faults
    is_settled, draw = True, nodes.draw
    for kind in chain.from_iterable(draw.sample(options.kinds, len(options.kinds)) for _ in range(2 * options.faults)):
        await asyncio.sleep(draw.uniform(0.5, options.pause))
        await course.answered((len(faults) + 0.5) / options.faults * options.num_streams)
        try:
            began = await main_thread.run(partial(nodes.strike, kind))
        except (ProcessLookupError, psutil.NoSuchProcess, RayError) as error:
            print(f"{kind} has not struck: an earlier fault has ended its target ({error!r:.80})", file=sys.stderr)
            is_settled = False
            continue
        faults.append(Fault(kind, began, time.time(), is_settled))
        is_settled = True
        failed = [*streams.lost, *slow.lost, *streams.differing, *slow.differing]
        answers = f"{streams.num_answers} and {slow.num_answers} slow answers, {len(failed)} failed {failed[-1:]}"
        print(f"{len(faults)} {kind}: {time.time() - began:.1f} s; {answers}", file=sys.stderr, flush=True)
        if len(faults) == options.faults:
            break
    else:
        raise AssertionError(f"only {len(faults)} faults have struck")
    await course.answered(options.num_streams)
    await asyncio.gather(streams.stop(), slow.stop())
    return course


def of_both_models(requests: Sequence[Ask]) -> list[Ask]:
    """Every other one is for the second model, which has no adapters, and whose template knows no tools."""
    return [
        ask if i % 2 == 0 or ask.kind in ("adapter", "tool call") else replace(ask, body=ask.body | {"model": SECOND})
        for i, ask in enumerate(requests)
    ]


def pauses(fault: Fault, streams: Streams) -> list[float]:
    """The longest time between two events of each stream that was live at the fault."""
    found = []
    for _, times in streams.times:
        if times and times[0] < fault.began < times[-1]:
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
    return {
        "settled": spread([fault.settled - fault.began for fault in alone]),
        "pauses of streams live at the fault": spread([s for fault in alone for s in pauses(fault, streams)]),
    }


def report(course: Course) -> dict[str, Any]:
    faults, streams, slow = course.faults, course.streams, course.slow
    kinds = Counter(fault.kind for fault in faults)
    lost, differing = streams.lost + slow.lost, streams.differing + slow.differing
    return {
        "faults": len(faults),
        "kinds": dict(kinds),
        "answers": streams.num_answers + slow.num_answers,
        "endings": streams.endings(),
        "lost": len(lost),
        "differing": len(differing),
        "examples": (lost + differing)[:10],
        "slow answers": {"as slow as asked": slow.num_slow, "seconds": spread(slow.lasted)},
        "single faults": summary([fault for fault in faults if fault.kind in SINGLE], streams),
    } | {kind: summary([fault for fault in faults if fault.kind == kind], streams) for kind in kinds}


def run(options: argparse.Namespace) -> dict[str, Any]:
    of_first: dict[str, Any] = {
        "model_parallel_size": options.ranks,
        "cpus_per_rank": 1 / options.ranks,  # a node has one CPU
    }
    main_thread = MainThread()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name, few_processes():
        if "adapter" in options.requests:
            root = Path(name, "adapters")
            for each in ADAPTERS:
                adapters.write(root / each, resolve("demo"), adapters.SHAPES[each])
            for number in range(2):
                adapters.write(
                    root / f"{LOADED}-{number}", resolve("demo"), adapters.SHAPES["patterns"], 1, 2.0**number
                )
            of_first |= {"lora_adapters": {each: str(root / each) for each in ADAPTERS}}
            of_first |= {"lora_root": str(root), "max_loras": MAX_LORAS}
        nodes = Nodes(
            Path(name),
            options.engines,
            random.Random(options.seed),
            of_first,
            options.scales,
            max_batch_size=options.max_batch_size,
            max_seq_len=1048 + max(options.max_tokens, options.slow_tokens),
        )
        signal.signal(signal.SIGTERM, lambda *_: _end_at_once(nodes))
        try:
            with ThreadPoolExecutor(1) as pool:
                striking = pool.submit(asyncio.run, strike(nodes, main_thread, options))
                main_thread.serve_until(striking)
            return report(striking.result())
        finally:
            if options.log:
                options.log.write_text(nodes.logs())
            nodes.end()


def _end_at_once(nodes: Nodes) -> None:
    """The clients' thread would wait for its answers."""
    nodes.end()
    os._exit(128 + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--engines", type=int, default=2, help="of each of two models")
    parser.add_argument("--ranks", type=int, default=2, help="of an engine of the first model")
    parser.add_argument("--max-batch-size", type=int, default=8, help="of an engine; by default most are full")
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--num-streams", type=int, default=0, help="answers, over which the faults are spread evenly")
    parser.add_argument("--slow", type=float, default=0.0, help="share of the clients that read slowly")
    parser.add_argument("--slow-s", type=float, default=125.0, help="seconds of a slow client's stream")
    parser.add_argument("--slow-tokens", type=int, default=1000, help="--max-tokens of slow clients")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between faults at most")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, LULL], help="of faults")
    parser.add_argument(
        "--scales",
        action="store_true",
        help="Serve chooses the number of engines: 1 and 0 at least; adds the fault lull",
    )
    parser.add_argument("--requests", nargs="+", default=list(REQUESTS), choices=list(REQUESTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="file for the logs of the replicas")
    options = parser.parse_args(arguments)
    if LULL in options.kinds and not options.scales:
        parser.error(f"{LULL} needs --scales")
    options.kinds += [LULL] * (options.scales and LULL not in options.kinds)
    result = run(options)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if result["lost"] or result["differing"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
