"""Injects faults into ranks under live streams (kill, stop, exception, memory, slowness, partition) and checks every stream.

python -m tests.chaos --faults 200 --streams 50 --json report.json
"""

import argparse
import asyncio
import json
import math
import random
import re
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.asks import KINDS as REQUESTS
from tests.chaos.asks import asks
from tests.chaos.faulty_ranks import DIRECTORY, FACTORY, KINDS, PHASES, order
from tests.chaos.from_outside import READY_TIMEOUT_S, footprint, kill_a_rank, kill_any, leaks, ready, spread
from tests.chaos.load import Streams
from tests.support.fake_runner import Kind, Phase
from tests.support.server import Server, served

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}).*?(recovering|recovered after)")


@dataclass
class Fault:
    """A fault that happened; times are those of time.time()."""

    kind: Kind
    rank: int
    phase: Phase | str
    at: float


async def main_async(options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        args = {"model_parallel_size": options.ranks, "step_timeout_s": options.step_timeout, "max_batch_size": 64}
        args |= {"spare_ranks": options.standby, "cpus_per_rank": 1}
        env = {DIRECTORY: str(directory), "LLAMA_RUNNER_FACTORY": FACTORY}
        with served(args=args, env=env) as server:
            server.wait_ready()
            model = server.get("/v1/models")[1]["data"][0]["id"]
            load_s = max(rank["load_seconds"] for rank in server.get("/props")[1]["ranks"])
            streams = Streams(
                server.url, asks(options.streams, model, options.max_tokens, kinds=options.requests), options.streams
            )
            await streams.learn()
            before = footprint(server)
            streams.start()
            try:
                faults = await strike(server, directory, draw, options)
            finally:
                if options.log:
                    options.log.write_text(server.output())
            await streams.stop()
            await ready(server)
            after, settled_by = footprint(server), time.monotonic() + options.settle
            while leaks(before, after, num_ranks(options)) and time.monotonic() < settled_by:
                await asyncio.sleep(1.0)  # standby processes start, and Ray keeps idle workers for a while
                after = footprint(server)
            if options.log:
                options.log.write_text(server.output())
            result = {"load_s": load_s} | report(options, faults, streams, server.output(), before, after)
            if options.two_ctrl_c:
                result["ended"] = await end_by_two_ctrl_c(server)
            return result


async def end_by_two_ctrl_c(server: Server) -> dict[str, Any]:
    """End the server during a stream: its exit status, the seconds from the second signal, and the processes that are left."""
    body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    async with (
        httpx.AsyncClient(timeout=90, trust_env=False) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        assert (await anext(answer.aiter_lines())).startswith("data: ")
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
        began = time.monotonic()
        status = await asyncio.to_thread(server.process.wait, 120)
        seconds = time.monotonic() - began
    return {"status": status, "seconds": seconds, "left": list((await asyncio.to_thread(server.wait_gone)).values())}


async def strike(server: Server, directory: Path, draw: random.Random, options: argparse.Namespace) -> list[Fault]:
    faults: list[Fault] = []
    while len(faults) < options.faults:
        await asyncio.sleep(draw.uniform(0.0, options.pause))
        kind: Kind = draw.choice(options.kinds)
        rank, phase = draw.randrange(options.ranks), draw.choice(PHASES)
        if kind == "partition" and phase in (
            "load",
            "rendezvous",
        ):  # only start_timeout_s bounds a hang in these phases
            phase = "decode"
        if kind in ("raise", "memory"):
            # Repeated exceptions in one prefill, without progress between them, look like a request that crashes its ranks.
            await ready(server)
            await asyncio.sleep(1.0)
        pending = order(directory, rank, kind, phase)
        if phase in ("load", "rendezvous"):
            # The fault strikes the next group's ranks, so end this group unless it is ending already.
            await ready(server)
            faults.append(Fault("kill", kill_a_rank(server, draw), "any", time.time()))
        elif draw.random() < 0.2:
            kill_any(server, draw)
            faults.append(Fault("kill", -1, "any", time.time()))
        when = await happened(pending)
        faults.append(Fault(kind, rank, phase, when))
        if draw.random() < 0.5:  # else the next fault strikes before the server has recovered
            await ready(server)
    await ready(server)
    return faults


async def happened(done: Path) -> float:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return float(done.read_text())  # noqa: ASYNC240 (a few bytes)
        except (FileNotFoundError, ValueError):
            await asyncio.sleep(0.01)
    raise TimeoutError(f"no rank took the demanded fault {done.name} within {READY_TIMEOUT_S:g} s")


def report(
    options: argparse.Namespace,
    faults: list[Fault],
    streams: Streams,
    output: str,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    stamps = sorted({(_seconds(match[1]), match[2]) for match in _STAMP.finditer(output)})
    seen = [at for at, what in stamps if what == "recovering"]
    recovered = [at for at, what in stamps if what != "recovering"]
    detection: dict[str, list[float]] = {"death": [], "error": [], "hang": []}
    for fault, following in zip_longest(faults, faults[1:]):
        index = bisect_right(seen, fault.at - 0.002)
        alone = following is None or index == len(seen) or seen[index] < following.at
        if fault.rank >= 0 and fault.phase not in ("load", "rendezvous") and alone and index < len(seen):
            sign = {"kill": "death", "stop": "hang", "partition": "hang", "raise": "error", "memory": "error"}.get(
                fault.kind
            )
            if sign:
                detection[sign].append(seen[index] - fault.at)
    pauses = []
    for at, following_s in zip_longest(seen, seen[1:], fillvalue=math.inf):
        for _, times in streams.times:
            index = bisect_right(times, at)
            if 0 < index < len(times) and times[index] < following_s:
                pauses.append(times[index] - at)
    return {
        "faults": len(faults),
        "kinds": dict(Counter(fault.kind for fault in faults)),
        "phases": dict(Counter(fault.phase for fault in faults)),
        "streams": options.streams,
        "answers": streams.num_answers,
        "endings": streams.endings(),
        "lost": len(streams.lost),
        "differing": len(streams.differing),
        "examples": (streams.lost + streams.differing)[:5],
        "recoveries": len(recovered),
        "detection_s": {name: spread(values) for name, values in detection.items()},
        "recovery_s": spread([float(x) for x in re.findall(r"recovered after ([\d.]+) s", output)]),
        "first_new_token_s": spread(pauses),
        "before": before,
        "after": after,
        "left": leaks(before, after, num_ranks(options)),
    }


def num_ranks(options: argparse.Namespace) -> int:
    """Ranks, standby processes included."""
    return int(options.ranks * (2 if options.standby else 1))


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between faults at most")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds for memory and threads to settle")
    parser.add_argument("--step-timeout", type=float, default=3.0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="of faults")
    parser.add_argument(
        "--requests", nargs="+", default=list(REQUESTS), choices=list(REQUESTS), help="kinds of requests"
    )
    parser.add_argument("--standby", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--timed", action=argparse.BooleanOptionalAction, default=True, help="fail where a fault is detected late"
    )
    parser.add_argument("--two-ctrl-c", action="store_true", help="end the server by two Ctrl-C during a stream")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="file for the server's output")
    options = parser.parse_args(arguments)
    result = asyncio.run(main_async(options))
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if result["lost"] or result["differing"] or result["left"]:
        sys.exit(1)
    if options.timed and not is_seen_in_time(result["detection_s"], options.step_timeout):
        sys.exit(2)


def is_seen_in_time(detection_s: dict[str, dict[str, float] | None], step_timeout_s: float) -> bool:
    """Whether 99 of 100 faults were detected in time: a death within 1 s, a hang within 1 s of the step deadline."""
    limits_s = {"death": 1.0, "hang": step_timeout_s + 1.0}
    return all((seen := detection_s[sign]) is None or seen["p99"] <= limit_s for sign, limit_s in limits_s.items())


if __name__ == "__main__":
    main()
