"""Latency of /health while clients send large bodies that are all refused.

    python -m benchmarks refusals                 the replica's HTTP side alone, without Ray
    python -m benchmarks refusals --url URL       a running server

Each client sends bodies of one kind again and again, over new connections: many texts, one long text, a long chat, many lists
of token ids. Every one is too long for the context, so every answer should be 400, and no body should delay another request.
"""

import contextlib
import http.client
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.queues import Queue
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness.common import emit, percentile, print_table
from benchmarks.harness.options import question_parser
from benchmarks.harness.programs import end_programs_on_sigterm
from benchmarks.questions.streaming import STEP_MS, app_alone

GOAL_MS = 100.0  # of /health, for 99 of 100 requests
NUM_PROMPTS = 128
SENTENCE = "Once upon a time there was a fox. "
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SPAWN = multiprocessing.get_context("spawn")


def bodies(num_bytes: int) -> list[tuple[str, bytes]]:
    """(path, body) of each kind, each of about `num_bytes`."""
    text = SENTENCE * (num_bytes // len(SENTENCE))
    ids = [number % 600 for number in range(num_bytes // NUM_PROMPTS // 5)]
    made: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": [text[: num_bytes // NUM_PROMPTS]] * NUM_PROMPTS}),
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (COMPLETIONS, {"prompt": [ids] * NUM_PROMPTS}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in made]


def send_again_and_again(netloc: str, path: str, body: bytes, seconds: float, results: "Queue[Counter[str]]") -> None:
    """One client, in a process of its own. Puts the number of answers of each kind into the queue."""
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.closing(http.client.HTTPConnection(netloc, timeout=60)) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            code = json.loads(answer.read()).get("error", {}).get("code", "")
            seen[f"{answer.status} {code}".strip()] += 1
    results.put(seen)


def health_ms(netloc: str, seconds: float) -> list[float]:
    """Milliseconds of successive requests to /health."""
    waits = []
    end = time.monotonic() + seconds
    with contextlib.closing(http.client.HTTPConnection(netloc, timeout=60)) as connection:
        while time.monotonic() < end:
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.01)
    return waits


def measure(url: str, num_clients: int, num_bytes: int, seconds: float) -> dict[str, Any]:
    netloc, kinds = urlsplit(url).netloc, bodies(num_bytes)
    results: Queue[Counter[str]] = _SPAWN.Queue()
    clients = []
    for number in range(num_clients):
        arguments = (netloc, *kinds[number % len(kinds)], seconds + 2, results)
        clients.append(_SPAWN.Process(target=send_again_and_again, args=arguments, daemon=True))
        clients[-1].start()
    time.sleep(1)  # until most clients have started
    waits = health_ms(netloc, seconds)
    answers: Counter[str] = sum((results.get() for _ in clients), Counter())
    for client in clients:
        client.join()
    figures = {"health_p50_ms": percentile(waits, 50), "health_p99_ms": percentile(waits, 99)}
    return figures | {"health_max_ms": max(waits), "answers": dict(answers)}


def main(argv: Sequence[str]) -> None:
    parser = question_parser("refusals", __doc__)
    parser.add_argument("--url", help="of a running server; the application alone if absent")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--bytes", type=int, default=5_200_000, help="of a body")
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    os.environ[STEP_MS] = "8"  # paced ranks need a value; no request reaches them
    with contextlib.nullcontext(None) if options.url else app_alone() as target:
        url = options.url if target is None else target.url
        figures = measure(url, options.clients, options.bytes, options.seconds)
    print_table(
        f"/health beside {options.clients} clients with bodies of {options.bytes / 1e6:g} MB",
        ["", "ms"],
        [[name, round(value, 1)] for name, value in figures.items() if isinstance(value, float)],
    )
    verdict = "met" if figures["health_p99_ms"] < GOAL_MS else "MISSED"
    print(f"\n  answers: {figures['answers']}\n  goal for the 99th percentile: {GOAL_MS:g} ms, {verdict}")
    emit("refusals", figures | {"clients": options.clients, "bytes": options.bytes, "goal_ms": GOAL_MS}, options)
