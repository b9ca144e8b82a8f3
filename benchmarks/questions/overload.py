"""Goodput under overload: how many requests a server completes, how fast, and how soon it refuses the others.

    python -m benchmarks overload --serve --ckpt DIRECTORY --seconds 300      ours, started and ended here
    python -m benchmarks overload --url http://127.0.0.1:8000 --model llama-demo --vocab-size 500

The peak is measured first, by a closed loop of each number of `--clients`: it is at the fewest clients whose goodput (tokens a
second of complete answers) is within 2 % of the best. An open loop with Poisson arrivals then offers `--factor` times the
requests that were served a second at the peak. The peak is measured again afterwards, because a shared machine changes within
minutes; the overload is compared with the mean of both. An answer is complete, or refused with Retry-After; any other is
lost, and the command fails. Times count from when a request was due, not from when it was sent. The table shows the processor
time of the client, which shares the server's cores.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import uvloop

from benchmarks.harness.common import emit, percentile, print_table
from benchmarks.harness.load import Answer, HttpSession
from benchmarks.harness.options import (
    add_load_options,
    add_model_options,
    add_server_options,
    model_name,
    question_parser,
)
from benchmarks.harness.programs import end_programs_on_sigterm, our_server
from benchmarks.harness.serve_ours import server_args
from benchmarks.harness.workload import Request, random_prompt

NEAR_THE_BEST = 0.98
# Not a steady state: slots fill at the beginning, and no request arrives at the end.
WARM_UP_SHARE = 0.15
GOALS = {"goodput_of_peak": 0.95, "ttft_p99_of_peak": 2.0, "refused_p99_ms": 100.0}


@dataclass(frozen=True, slots=True)
class Due:
    """An answer, and the time at which its request was due, on the same clock."""

    answer: Answer
    due_s: float

    @property
    def is_whole(self) -> bool:
        return self.answer.error is None and bool(self.answer.token_times)

    @property
    def is_refused(self) -> bool:
        return self.answer.status == 429 and self.answer.retry_after is not None


class Sessions:
    """Connections to the server, as many as are in use at once; a free one is used again."""

    def __init__(self, new: Callable[[], HttpSession]) -> None:
        self._new = new
        self._free: list[HttpSession] = []
        self._all: list[HttpSession] = []

    async def ask(self, request: Request, due_s: float) -> Due:
        if not self._free:
            self._free.append(self._new())
            self._all.append(self._free[-1])
        session = self._free.pop()
        await session.ask(request)
        (answer,) = session.answers()
        self._free.append(session)
        return Due(answer, due_s)

    async def close(self) -> None:
        for session in self._all:
            await session.close()


def requests_of(num_prompt: int, num_output: int, vocab_size: int, seed: int) -> Iterator[Request]:
    """An endless sequence of requests with different prompts."""
    return (Request(random_prompt(num_prompt, vocab_size, 10**7 * seed + i), num_output) for i in itertools.count())


async def closed_loop(
    sessions: Sessions, num_clients: int, requests: Iterator[Request], seconds: float
) -> dict[str, Any]:
    """Each client sends the next request when its last answer is complete; after a refusal it waits for Retry-After."""
    began, cpu, seen = time.perf_counter(), time.process_time(), list[Due]()
    end = began + seconds

    async def work() -> None:
        while (now := time.perf_counter()) < end:
            seen.append(await sessions.ask(next(requests), now))
            answer = seen[-1].answer
            if answer.error is not None:
                await asyncio.sleep(min(float(answer.retry_after or 0.1), max(0.0, end - time.perf_counter())))

    await asyncio.gather(*(work() for _ in range(num_clients)))
    return figures(seen, began, end, time.process_time() - cpu)


async def open_loop(sessions: Sessions, rate: float, requests: Iterator[Request], seconds: float) -> dict[str, Any]:
    """Poisson arrivals of `rate` requests a second for `seconds`; returns when the last answer has ended."""
    draw, asking = random.Random(7), list[asyncio.Task[Due]]()
    began, cpu = time.perf_counter(), time.process_time()
    end, due = began + seconds, began
    while (due := due + draw.expovariate(rate)) < end:
        request = next(requests)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asking.append(asyncio.create_task(sessions.ask(request, due)))
    seen = await asyncio.gather(*asking)
    return figures(seen, began, end, time.process_time() - cpu)


def figures(seen: Sequence[Due], began_s: float, end_s: float, client_cpu_s: float) -> dict[str, Any]:
    """Goodput and times within the window of steady load; counts are of all requests."""
    start = began_s + WARM_UP_SHARE * (end_s - began_s)
    window = end_s - start
    whole = [one for one in seen if one.is_whole]
    refused = [one for one in seen if one.is_refused]
    lost = [one.answer.error or "no token came" for one in seen if not (one.is_whole or one.is_refused)]
    tokens = sum(
        one.answer.num_tokens / len(one.answer.token_times) * sum(start <= at < end_s for at in one.answer.token_times)
        for one in whole
    )
    first = [1e3 * (one.answer.token_times[0] - one.due_s) for one in whole if start <= one.due_s < end_s]
    told = [1e3 * (one.answer.ended_s - one.due_s) for one in refused if start <= one.due_s < end_s]
    return {
        "requests": len(seen),
        "whole": len(whole),
        "refused": len(refused),
        "lost": len(lost),
        "errors": sorted(set(lost))[:3],
        "goodput_tok_s": tokens / window,
        "served_requests_s": sum(start <= one.answer.ended_s < end_s for one in whole) / window,
        "ttft_p50_ms": percentile(first, 50) if first else None,
        "ttft_p99_ms": percentile(first, 99) if first else None,
        "refused_p50_ms": percentile(told, 50) if told else None,
        "refused_p99_ms": percentile(told, 99) if told else None,
        "client_cpu_cores": client_cpu_s / (max(one.answer.ended_s for one in seen) - began_s) if seen else 0.0,
    }


def peak_of(loads: dict[int, dict[str, Any]]) -> int:
    """The fewest clients whose goodput is within 2 % of the best."""
    best = max(load["goodput_tok_s"] for load in loads.values())
    return min(clients for clients, load in loads.items() if load["goodput_tok_s"] >= NEAR_THE_BEST * best)


def mean_of(figure: str, *loads: dict[str, Any]) -> float | None:
    """The mean over the loads that have the figure; None if none has, as when no request fell into a short window."""
    values = [load[figure] for load in loads if load[figure] is not None]
    return fmean(values) if values else None


async def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    sessions = Sessions(lambda: HttpSession(url, options.model))
    lengths = (options.prompt, options.output, options.vocab_size)
    try:
        await closed_loop(sessions, max(options.clients), requests_of(*lengths, seed=1), options.peak_seconds / 4)
        loads = {
            clients: await closed_loop(sessions, clients, requests_of(*lengths, seed=2 + i), options.peak_seconds)
            for i, clients in enumerate(options.clients)
        }
        peak = peak_of(loads)
        if not loads[peak]["goodput_tok_s"]:
            raise ValueError("no answer was complete in time: --peak-seconds must be longer")
        rate = options.factor * loads[peak]["goodput_tok_s"] / options.output
        over = await open_loop(sessions, rate, requests_of(*lengths, seed=99), options.seconds)
        again = await closed_loop(sessions, peak, requests_of(*lengths, seed=98), options.peak_seconds)
    finally:
        await sessions.close()
    goodput = mean_of("goodput_tok_s", loads[peak], again)
    ttft_ms = mean_of("ttft_p99_ms", loads[peak], again)
    return {
        "closed_loop": {str(clients): load for clients, load in loads.items()},
        "peak_clients": peak,
        "offered_requests_s": rate,
        "overload": over,
        "peak_again": again,
        "goodput_of_peak": over["goodput_tok_s"] / goodput if goodput else None,
        "ttft_p99_of_peak": over["ttft_p99_ms"] / ttft_ms if over["ttft_p99_ms"] and ttft_ms else None,
        "refused_p99_ms": over["refused_p99_ms"],
        "goals": GOALS,
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("overload", __doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server, without /v1")
    where.add_argument("--serve", action="store_true", help="start and end our server")
    add_load_options(parser, prompt=128, output=64)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16, 24, 32], help="of the closed loops")
    parser.add_argument("--peak-seconds", type=float, default=30.0, help="of each closed loop")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--factor", type=float, default=2.0, help="times the requests a second at the peak")
    parser.add_argument("--batch", type=int, default=32, help="max_batch_size of --serve")
    parser.add_argument(
        "--queue", type=int, default=8, help="max_queue of --serve: an admitted request waits behind so many"
    )
    add_server_options(parser)
    add_model_options(parser)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        url = options.url
        if options.serve:
            end_programs_on_sigterm()
            args = server_args(
                options,
                max_seq_len=options.prompt + options.output,
                max_batch_size=options.batch,
                max_queue=options.queue,
            )
            program, url = stack.enter_context(our_server(args))
            program.wait_until_answers(url + "/ready")
        found = uvloop.run(measure(options, url))
    names = ("goodput_tok_s", "served_requests_s", "ttft_p50_ms", "ttft_p99_ms", "refused_p50_ms", "refused_p99_ms",
             "whole", "refused", "lost", "client_cpu_cores")  # fmt: skip
    loads = [(f"{clients} clients", load) for clients, load in found["closed_loop"].items()]
    loads.append((f"{found['offered_requests_s']:.1f} req/s for {options.seconds:g} s", found["overload"]))
    loads.append((f"{found['peak_clients']} clients again", found["peak_again"]))
    print_table(
        f"Overload, prompt {options.prompt}, output {options.output}",
        ["load", *names],
        [(what, *(one[name] for name in names)) for what, one in loads],
    )
    over, peak = found["overload"], found["closed_loop"][str(found["peak_clients"])]
    load = f"prompt {options.prompt}, output {options.output}"
    seconds = {"peak_seconds": options.peak_seconds, "seconds": options.seconds, "factor": options.factor}
    queue = {"queue": options.queue, "batch": options.batch} if options.serve else {}
    name = model_name(options) if options.serve else options.model
    emit("overload", {"model": name, "load": load, **seconds, **queue, "peak": peak, **found}, options)
    if any(one["lost"] for one in (over, found["peak_again"], *found["closed_loop"].values())):
        sys.exit(1)
