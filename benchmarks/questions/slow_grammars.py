"""What streams without a grammar lose beside a request whose grammar is slow.

    python -m benchmarks slow_grammars --ckpt FILE.gguf --tokenizer FILE.gguf --rounds 4

Starts the server and puts a closed loop of streaming clients on it. Each round measures them alone, beside an answer in an
ambiguous grammar, each of whose tokens takes longer than the one before, beside requests of large schemas, each of which is
new and has to be compiled, and beside requests of schemas that are too large, each of which is new and refused.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp
import uvloop

from benchmarks.harness.common import Spread, emit, percentile, print_table
from benchmarks.harness.load import Answer, HttpSession, drive
from benchmarks.harness.options import add_load_options, add_model_options, add_server_options, question_parser
from benchmarks.harness.programs import end_programs_on_sigterm, our_server
from benchmarks.harness.serve_ours import server_args
from benchmarks.harness.workload import Request, uniform_batch

AMBIGUOUS = 'start: s\ns: s s | "a" | "b"'
SLOW_FROM = 300  # tokens of the ambiguous answer: from here on a token takes longer than a step
LONGEST_LEAD_S = 60.0  # for these tokens
CASES = ("alone", "ambiguous", "schemas", "refused")


def large_schema(number: int) -> dict[str, Any]:
    """A schema of about 50 kB that no other request has."""
    parts = {
        f"part_{number}_{i}_{'x' * 100}": {
            "type": "object",
            "properties": {f"text_{j}_{i}": {"type": "string", "maxLength": 5 + i} for j in range(6)},
            "additionalProperties": False,
        }
        for i in range(120)
    }
    return {"type": "object", "properties": parts, "additionalProperties": False}


def refused_schema(number: int) -> dict[str, Any]:
    """A schema of 71 kB that no other request has, and that is too large: finding this out takes 0.3 s of processor time."""
    names = (f"optional_{number}_{i}" for i in range(1500))
    return {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "additionalProperties": False,
    }


@contextlib.asynccontextmanager
async def ambiguous_answer(http: aiohttp.ClientSession, options: argparse.Namespace) -> AsyncIterator[list[float]]:
    """Runs while answers are generated, one after the other, whose tokens become slower."""
    is_slow = asyncio.Event()

    async def answer() -> None:
        seed = 0
        while True:
            seed += 1
            body = {
                "model": options.model, "prompt": "a", "stream": True, "seed": seed, "max_tokens": 1500,
                "structured_outputs": {"grammar": AMBIGUOUS}, "logit_bias": dict.fromkeys(options.stop_ids, -100),
            }  # fmt: skip
            async with http.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                num_tokens = 0
                async for line in response.content:
                    num_tokens += line.startswith(b"data: {")
                    if num_tokens >= SLOW_FROM:
                        is_slow.set()
            is_slow.set()  # the server has ended it, because its grammar is too slow

    async with running(answer()) as task:
        waiting = asyncio.create_task(is_slow.wait())
        await asyncio.wait([waiting, task], timeout=LONGEST_LEAD_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        yield []


@contextlib.asynccontextmanager
async def schemas(
    made: Callable[[int], dict[str, Any]], status: int, http: aiohttp.ClientSession, options: argparse.Namespace
) -> AsyncIterator[list[float]]:
    """Runs while requests with schemas come, one after the other, each of which is answered with `status`. Yields the times of
    their answers."""
    answered: list[float] = []

    async def ask() -> None:
        while True:
            schema = {"name": "large", "schema": made(time.monotonic_ns())}
            body = {
                "model": options.model, "prompt": "a", "max_tokens": 4,
                "response_format": {"type": "json_schema", "json_schema": schema},
            }  # fmt: skip
            async with http.post("/v1/completions", json=body) as response:
                answer = await response.text()
                if response.status != status:
                    raise RuntimeError(f"status {response.status}: {answer[:200]}")
                answered.append(time.perf_counter())

    async with running(ask()):
        yield answered


@contextlib.asynccontextmanager
async def running(work: Any) -> AsyncIterator["asyncio.Task[None]"]:
    """Raises what the work raised; it ends with the context."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of time.perf_counter, half-open, and how many requests with a slow grammar were answered in it."""

    begin_s: float
    end_s: float
    num_answered: int

    def figures(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Of the tokens that reached clients in the window; an answer's tokens are spread evenly over its events."""
        tokens, gaps = 0.0, []
        for answer in answers:
            inside = sum(self.begin_s <= at < self.end_s for at in answer.token_times)
            tokens += inside * answer.num_tokens / max(1, len(answer.token_times))
            gaps += [1e3 * (b - a) for a, b in pairwise(answer.token_times) if self.begin_s <= b < self.end_s]
        return {
            "tok_s": tokens / (self.end_s - self.begin_s),
            "longest_gap_ms": max(gaps),
            "between_p50_ms": percentile(gaps, 50),
            "between_p99_ms": percentile(gaps, 99),
            "requests_s": self.num_answered / (self.end_s - self.begin_s),
        }


async def rounds(options: argparse.Namespace, url: str) -> tuple[dict[str, list[Window]], list[Answer]]:
    """The windows of each case, and all answers of the streaming clients."""
    stopped = False
    batch = uniform_batch(64, options.prompt, options.output, options.vocab_size)

    def requests() -> Iterator[Request]:
        while not stopped:
            yield from batch

    async def measure() -> dict[str, list[Window]]:
        nonlocal stopped
        windows: dict[str, list[Window]] = {case: [] for case in options.cases}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, timeout=timeout) as http:
            beside: dict[str, Callable[..., contextlib.AbstractAsyncContextManager[list[float]]]] = {
                "ambiguous": ambiguous_answer,
                "schemas": partial(schemas, large_schema, 200),
                "refused": partial(schemas, refused_schema, 400),
            }
            for _ in range(options.rounds):
                for case in options.cases:
                    await asyncio.sleep(1.0)
                    load = beside[case](http, options) if case in beside else contextlib.nullcontext([])
                    async with load as answered:
                        begin = time.perf_counter()
                        await asyncio.sleep(options.seconds)
                        end = time.perf_counter()
                    windows[case].append(Window(begin, end, sum(begin <= each < end for each in answered)))
        stopped = True
        return windows

    sessions = [HttpSession(url, options.model) for _ in range(options.clients)]
    try:
        windows, load = await asyncio.gather(measure(), drive(sessions, requests()))
    finally:
        for session in sessions:
            await session.close()
    return windows, load.answers


def main(argv: Sequence[str]) -> None:
    parser = question_parser("slow_grammars", __doc__)
    add_load_options(parser, prompt=16, output=128, vocab_size=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window")
    parser.add_argument("--stop-ids", type=int, nargs="*", default=[0, 2], help="tokens that the slow answer avoids")
    add_server_options(parser)
    add_model_options(parser)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    args = server_args(options, max_seq_len=2048, max_batch_size=options.clients + 1)
    with our_server(args) as (program, url):
        program.wait_until_answers(url + "/ready")
        windows, answers = uvloop.run(rounds(options, url))
    figures: dict[str, Any] = {"failed": sum(answer.error is not None for answer in answers)}
    rows: list[tuple[object, ...]] = []
    for case, of_case in windows.items():
        found = [window.figures(answers) for window in of_case]
        row = {name: Spread.of(each[name] for each in found) for name in found[0]}
        figures |= {f"{case}_{name}": value for name, value in row.items()}
        rows.append((case, *row.values()))
    print_table(
        f"{options.clients} streams beside slow grammars, windows of {options.seconds:g} s",
        ["beside", "tok/s", "longest gap ms", "between p50 ms", "p99 ms", "slow req/s"],
        rows,
    )
    emit("slow_grammars", figures, options)
