"""Hours under load with a rank killed every minute: at most 0.1 % of requests fail, no answer differs, no resource grows.

python -m tests.chaos.soak --seconds 7200 --every 60 --json report.json
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.from_outside import READY_TIMEOUT_S, footprint, kill_a_rank, leaks, ready, spread
from tests.chaos.load import Streams, asks
from tests.support.server import Server, served
from tests.support.waiting import until

STILL_COMING_S = 0.2
SETTLE_S = 25.0  # standby processes start 5 s after ranks serve; lost ones are replaced within half a minute


async def main_async(options: argparse.Namespace) -> dict[str, Any]:
    with served(args={"model_parallel_size": options.ranks, "cpus_per_rank": 1, "max_batch_size": 64}) as server:
        server.wait_ready()
        model = server.get("/v1/models")[1]["data"][0]["id"]
        streams = Streams(server.url, asks(options.streams, model, 160), options.streams, pause_s=options.pause)
        await streams.learn()
        streams.start()
        kills, ready_again, samples = await disturb(server, options)
        if options.log:
            options.log.write_text(server.output())
        await streams.stop()
        await ready(server)
        await asyncio.sleep(SETTLE_S)
        return report(options, streams, kills, ready_again, samples, footprint(server))


async def disturb(
    server: Server, options: argparse.Namespace
) -> tuple[list[float], list[float], list[dict[str, float]]]:
    """Kill a rank every `options.every` seconds. Returns the time.time() of each kill, the seconds from each to readiness, and
    the footprint before each.
    """
    draw, began = random.Random(options.seed), time.monotonic()
    kills: list[float] = []
    ready_again: list[float] = []
    samples: list[dict[str, float]] = []
    while (left_s := began + options.seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(options.every, left_s))
        if time.monotonic() >= began + options.seconds:
            break
        await ready(server)
        samples.append({"s": round(time.monotonic() - began)} | await asyncio.to_thread(footprint, server))
        before = await until("a request runs", partial(props_while_a_request_runs, server), pause_s=0.002)
        kills.append(time.time())
        await asyncio.to_thread(kill_a_rank, server, draw)
        replaced = partial(props_with_other_ranks, server, before["ranks"])
        now = await until("the killed rank's group is replaced", replaced, READY_TIMEOUT_S, 0.02)
        assert now["epoch"] > before["epoch"], "the replica itself was replaced:\n" + server.output()[-3000:]
        await ready(server)
        ready_again.append(time.time() - kills[-1])
    return kills, ready_again, samples


async def props(server: Server) -> dict[str, Any]:
    """The answer to GET /props, empty while the server does not answer. In a thread, because the clients share this loop."""
    return (await asyncio.to_thread(server.get, "/props"))[1]


async def props_while_a_request_runs(server: Server) -> dict[str, Any] | None:
    """The answer to GET /props if a request runs, so that a kill strikes a live stream also under a light load."""
    now = await props(server)
    return now if now.get("requests_running") else None


async def props_with_other_ranks(server: Server, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer to GET /props once it names other ranks than these."""
    now = await props(server)
    return now if now.get("ranks", ranks) != ranks else None


def report(
    options: argparse.Namespace,
    streams: Streams,
    kills: list[float],
    ready_again: list[float],
    samples: list[dict[str, float]],
    after: dict[str, float],
) -> dict[str, Any]:
    seen = samples[1:] or samples or [after]
    footprints = {name: trend([sample.get(name, 0.0) for sample in seen]) for name in after}
    # The first recoveries start thread pools and keep memory, which does not count as growth.
    before = {name: of_it["first"] for name, of_it in footprints.items()}
    return {
        "command": "python -m tests.chaos.soak " + " ".join(sys.argv[1:]),
        "seconds": options.seconds,
        "kills": len(kills),
        "streams": options.streams,
        "answers": streams.num_answers,
        "lost": len(streams.lost),
        "differing": len(streams.differing),
        "success": round(1 - len(streams.lost) / max(1, streams.num_answers), 6),
        "examples": (streams.lost + streams.differing)[:5],
        "ready_again_s": spread(ready_again),
        "first_new_token_s": spread(
            [pause for at in kills for times in streams.times if (pause := pause_after(at, times))]
        ),
        "footprint": footprints,
        "after": after,
        "grown": leaks(before, after, 2 * options.ranks),
    }


def pause_after(at: float, times: Sequence[float]) -> float:
    """Seconds from a kill at time `at` to the stream's first token of the new ranks; 0 for a stream that was not live then.
    `times` are those of its tokens. Tokens of the old ranks may still arrive, so the longest gap soon after the kill counts.
    """
    index = bisect_right(times, at)
    if not 0 < index < len(times):
        return 0.0
    soon = range(index, max(index + 1, bisect_right(times, at + STILL_COMING_S)) + 1)
    return max((times[i] - times[i - 1], times[i]) for i in soon if i < len(times))[1] - at


def trend(values: list[float]) -> dict[str, float]:
    """Medians of the first and the last quarter of the values, and the maximum."""
    quarter = max(1, len(values) // 4)
    first, last = statistics.median(values[:quarter] or [0.0]), statistics.median(values[-quarter:] or [0.0])
    return {"first": round(first, 1), "last": round(last, 1), "most": round(max(values, default=0.0), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a client between two requests")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="file for the server's output")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `served` ends the server
    result = asyncio.run(main_async(options))
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if not is_passed(result):
        sys.exit(1)


def is_passed(result: dict[str, Any]) -> bool:
    return bool(result["kills"] and result["success"] >= 0.999 and not result["differing"] and not result["grown"])


if __name__ == "__main__":
    main()
