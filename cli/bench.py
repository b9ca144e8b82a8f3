"""`llama-ray bench`: loads an OpenAI-compatible server with concurrent streams, and reports rates, latencies and errors.

A closed loop: each of `concurrency` clients sends its next request when its last answer has ended.
"""

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp

from cli.openai_http import ApiError, OpenAIHttp, error_text, headers_of, read_event

QUANTILES: Final = (50, 90, 99)
SAFE_IDS: Final = range(3, 256)  # ids that every vocabulary has, without the usual control tokens
WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
    *("system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. endpoint: "completions" sends prompts of exactly prompt_tokens ids, "chat" of so many words."""

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    concurrency: int = 8
    requests: int = 64
    warmup: int = 2
    prompt_tokens: int = 128
    max_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 1
    timeout_s: float = 600.0


@dataclass(slots=True)
class Sent:
    """One request as its client saw it; times in seconds of time.perf_counter.

    token_times: of each event with text. prompt_tokens and output_tokens: the server's counts where it says them; without them,
    an event counts as a token.
    """

    began_s: float
    ended_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_times) if self.output_tokens is None else self.output_tokens


def run(plan: Plan, json_file: Path | None) -> int:
    """Send the requests, print the table, and write the JSON. Returns 0, 1 if a request failed, or 130 after Ctrl-C."""
    try:
        client = OpenAIHttp(plan.url, plan.api_key)
        model = plan.model or client.first_model()
        with _Progress(plan.requests) as advance:
            sent, seconds = asyncio.run(drive(plan, client.base, model, advance))
    except ApiError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    found = report(plan, client.base, model, sent, seconds)
    to_stdout = json_file is not None and str(json_file) == "-"
    if json_file is not None:
        text = json.dumps(found, indent=2) + "\n"
        try:
            sys.stdout.write(text) if to_stdout else json_file.write_text(text)
        except OSError as error:
            print(f"bench: {json_file} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    if not to_stdout:
        show(found)
    return int(found["failed"] > 0)


async def drive(plan: Plan, base: str, model: str, advance: Callable[[], None]) -> tuple[list[Sent], float]:
    """Every request's record, without those of the warm-up, and the seconds from the first start to the last end."""
    timeout = aiohttp.ClientTimeout(total=plan.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    headers = headers_of(plan.api_key)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:

        async def work(bodies: Iterator[dict[str, Any]], sent: list[Sent]) -> None:
            for body in bodies:
                sent.append(await _ask(session, _path(plan, base), body))
                advance()

        if plan.warmup:
            await asyncio.gather(
                *(_ask(session, _path(plan, base), body) for body in bodies_of(plan, model, -plan.warmup, 0))
            )
        sent: list[Sent] = []
        bodies = bodies_of(plan, model, 0, plan.requests)
        began = time.perf_counter()
        await asyncio.gather(*(work(bodies, sent) for _ in range(min(plan.concurrency, plan.requests))))
        return sent, time.perf_counter() - began


def bodies_of(plan: Plan, model: str, first: int, last: int) -> Iterator[dict[str, Any]]:
    """The bodies of the requests `first` to `last`, each with a prompt of its own, the same for the same seed."""
    for number in range(first, last):
        source = random.Random(f"{plan.seed} {number}")
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if plan.endpoint == "completions":
            body["prompt"] = source.choices(SAFE_IDS, k=plan.prompt_tokens)
        else:
            body["messages"] = [{"role": "user", "content": " ".join(source.choices(WORDS, k=plan.prompt_tokens))}]
        yield body


def _path(plan: Plan, base: str) -> str:
    return base + ("/completions" if plan.endpoint == "completions" else "/chat/completions")


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Sent:
    sent = Sent(time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status == 200:
                await _read(response, sent)
            else:
                sent.error = error_text(response.status, await response.read())
    except (TimeoutError, ApiError, aiohttp.ClientError, OSError, ValueError) as error:
        sent.error = str(error) or type(error).__name__
    sent.ended_s = time.perf_counter()
    return sent


async def _read(response: aiohttp.ClientResponse, sent: Sent) -> None:
    async for line in response.content:
        chunk = read_event(line)
        if chunk is None:
            continue
        if chunk == {}:
            if not sent.token_times:
                sent.error = "the answer has no token"
            return
        if usage := chunk.get("usage"):
            sent.prompt_tokens = usage.get("prompt_tokens")
            sent.output_tokens = usage.get("completion_tokens")
        if _brings_text(chunk):
            sent.token_times.append(time.perf_counter())
    sent.error = "the stream ended without [DONE]"


def _brings_text(chunk: dict[str, Any]) -> bool:
    """Whether a chunk has a token. A chunk with a role alone, or with a finish reason alone, has none."""
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        parts = (
            choice.get("text"),
            *(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")),
        )
        if any(parts):
            return True
    return False


def report(plan: Plan, base: str, model: str, sent: Sequence[Sent], seconds: float) -> dict[str, Any]:
    """The figures; latencies in milliseconds, null where no request gives one."""
    good = [one for one in sent if one.error is None]
    several = [one for one in good if one.num_tokens > 1 and len(one.token_times) > 1]
    prompts = [one.prompt_tokens for one in good if one.prompt_tokens is not None]
    output_tokens = sum(one.num_tokens for one in good)
    latencies = {
        "ttft_ms": [one.token_times[0] - one.began_s for one in good],
        "tpot_ms": [(one.token_times[-1] - one.token_times[0]) / (one.num_tokens - 1) for one in several],
        "itl_ms": [after - before for one in good for before, after in pairwise(one.token_times)],
        "e2e_ms": [one.ended_s - one.began_s for one in good],
    }
    errors = Counter(one.error for one in sent if one.error is not None)
    return {
        "url": base,
        "model": model,
        "endpoint": plan.endpoint,
        "concurrency": plan.concurrency,
        "warmup": plan.warmup,
        "prompt_tokens": plan.prompt_tokens,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "seed": plan.seed,
        "requests": len(sent),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(5)),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "output_tokens": output_tokens,
        "prompt_tokens_mean": sum(prompts) / len(prompts) if prompts else None,
        "output_tokens_mean": output_tokens / len(good) if good else None,
        **{
            name: {f"p{q}": percentile(values, q) for q in QUANTILES} | {"mean": _mean(values)}
            for name, values in ((name, [1e3 * value for value in each]) for name, each in latencies.items())
        },
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the nearest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{found['model']} at {found['url']}, {found['concurrency']} clients", highlight=False, markup=False)
    rates = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("requests", f"{found['requests']} in {found['seconds']:.2f} s, {found['failed']} failed"),
        ("requests/s", f"{found['requests_per_s']:.2f}"),
        ("output tokens/s", f"{found['output_tokens_per_s']:.1f}"),
        ("prompt tokens", _number(found["prompt_tokens_mean"]) + " a request"),
        ("output tokens", _number(found["output_tokens_mean"]) + " a request"),
    ):
        rates.add_row(name, value)
    console.print(rates)
    table = Table()
    table.add_column("ms")
    for column in ("mean", *(f"p{q}" for q in QUANTILES)):
        table.add_column(column, justify="right")
    for name, key in (
        ("TTFT, to the first token", "ttft_ms"),
        ("TPOT, per output token after it", "tpot_ms"),
        ("ITL, between two events", "itl_ms"),
        ("E2E, whole request", "e2e_ms"),
    ):
        table.add_row(name, *(_number(found[key][column]) for column in ("mean", *(f"p{q}" for q in QUANTILES))))
    console.print(table)
    for error, count in found["errors"].items():
        console.print(f"{count} x {error}", style="red", markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


class _Progress:
    """A bar on stderr where that is a terminal. As a context manager it gives the function that advances it by one request."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="req", desc="bench", leave=False, disable=not sys.stderr.isatty())

    def __enter__(self) -> Callable[[], None]:
        return lambda: self._bar.update() and None

    def __exit__(self, *error: object) -> None:
        self._bar.close()
