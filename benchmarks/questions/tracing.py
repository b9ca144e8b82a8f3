"""Processor time that traces cost: requests that are sampled against requests that are not, in alternating pairs.

One server (`make serve`'s command) exports traces to a collector in another process, which reads and drops them. Each request
says by its `traceparent` whether it is sampled. A pair is two closed loops of the same requests; every other pair begins with
the sampled ones. The cost is the replica's additional processor time, its exporting thread included, as a share of what all
processes of the server take. Reading the headers of a request that is not sampled is measured by itself and added.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from benchmarks.harness.common import emit, print_table
from benchmarks.harness.load import HttpSession, drive
from benchmarks.harness.options import (
    add_load_options,
    add_model_options,
    add_server_options,
    model_name,
    question_parser,
)
from benchmarks.harness.processes import descendants
from benchmarks.harness.programs import end_programs_on_sigterm, our_server
from benchmarks.harness.serve_ours import server_args
from benchmarks.harness.workload import Request, uniform_batch
from benchmarks.questions.streaming import by_kind, cpu_ns

GOAL_PERCENT = 0.5
EXPORT_DELAY_S = 1.0
T_95 = {19: 2.093, 23: 2.069, 29: 2.045, 39: 2.023}  # two-sided, by degrees of freedom
_SPAWN = multiprocessing.get_context("spawn")
NUM_BEGINS = 5000


class TracedSession(HttpSession):
    """A session whose requests carry a context of W3C's, sampled or not."""

    def __init__(self, url: str, model: str, *, is_sampled: bool) -> None:
        super().__init__(url, model, new_connections=True)
        self._flags = "01" if is_sampled else "00"

    def _message(self, request: Request) -> bytes:
        head, separator, body = super()._message(request).partition(b"\r\n\r\n")
        context = f"\r\ntraceparent: 00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-{self._flags}"
        return head + context.encode() + separator + body


def collect(ready: Connection) -> None:
    """A collector that drops what it gets, in a process of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ready.send(server.server_address[1])
    server.serve_forever()


def run_client(url: str, model: str, orders: Connection) -> None:
    """A client in a process of its own: for each (is sampled, concurrency, requests, prompt, output, vocabulary, seed) the
    number of tokens."""
    import uvloop

    async def load(
        is_sampled: bool, concurrency: int, count: int, prompt: int, output: int, vocabulary: int, seed: int
    ) -> int:
        sessions = [TracedSession(url, model, is_sampled=is_sampled) for _ in range(concurrency)]
        done = await drive(sessions, uniform_batch(count, prompt, output, vocabulary, seed))
        figures = done.figures()
        assert not figures["failed"], figures["errors"]
        return int(figures["output_tokens"])

    while (order := orders.recv()) is not None:
        orders.send(uvloop.run(load(*order)))


def begin_us() -> float:
    """Processor time in microseconds of finding out that a request is not sampled."""
    from deployments.tracing.otlp import OtlpSink

    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    sink = OtlpSink({})
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
    began = time.thread_time()
    for _ in range(NUM_BEGINS):
        assert sink.begin("chat", headers) is None
    return 1e6 * (time.thread_time() - began) / NUM_BEGINS


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean."""
    mean, freedom = statistics.fmean(values), len(values) - 1
    t = T_95.get(freedom, 2.1 if freedom > 19 else 2.8)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def main(argv: Sequence[str]) -> None:
    parser = question_parser("tracing", __doc__)
    add_load_options(parser, prompt=64, output=128, vocab_size=1280)
    add_server_options(parser)
    add_model_options(parser)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32, help="of a loop")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    ours, theirs = _SPAWN.Pipe()
    collector = _SPAWN.Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{ours.recv()}",
        "OTEL_BSP_SCHEDULE_DELAY": str(int(1000 * EXPORT_DELAY_S)),
    }
    try:
        rounds = _measure(options, env)
    finally:
        collector.terminate()
    _report(options, rounds)


def _measure(options: argparse.Namespace, env: dict[str, str]) -> list[dict[bool, tuple[float, float]]]:
    """For each pair, by whether requests were sampled: seconds of the replica, and of all processes of the server."""
    with our_server(server_args(options, max_seq_len=options.prompt + options.output + 16), env) as (program, url):
        program.wait_until_answers(url + "/ready")
        orders, theirs = _SPAWN.Pipe()
        client = _SPAWN.Process(target=run_client, args=(url, options.model, theirs), daemon=True)
        client.start()

        def loop(is_sampled: bool, seed: int) -> tuple[float, float]:
            processes = by_kind(sorted(descendants([program.process.pid])))
            before = {kind: cpu_ns(pids) for kind, pids in processes.items()}
            load = (options.concurrency, options.requests, options.prompt, options.output, options.vocab_size, seed)
            orders.send((is_sampled, *load))
            orders.recv()
            time.sleep(EXPORT_DELAY_S + 0.5)  # the batch is exported
            after = {kind: cpu_ns(pids) for kind, pids in processes.items()}
            taken = {
                kind: sum(ns - before[kind].get(thread, 0) for thread, ns in after[kind].items()) / 1e9
                for kind in after
            }
            return taken["replica"], sum(taken.values())

        for is_sampled in (True, False):
            loop(is_sampled, 0)  # warms up
        rounds = []
        for pair in range(options.pairs):
            order = (True, False) if pair % 2 else (False, True)
            rounds.append({is_sampled: loop(is_sampled, 1 + pair) for is_sampled in order})
        orders.send(None)
        client.join(5)
    return rounds


def _report(options: argparse.Namespace, rounds: Sequence[dict[bool, tuple[float, float]]]) -> None:
    extra_us = interval([1e6 * (pair[True][0] - pair[False][0]) / options.requests for pair in rounds])
    whole_us = 1e6 * statistics.fmean(pair[False][1] for pair in rounds) / options.requests
    before_us = begin_us()
    shares = [100 * (us + before_us) / whole_us for us in extra_us]
    print_table(
        f"Processor time of traces, {model_name(options)}, {options.concurrency} streams, {options.prompt} tokens in, "
        f"{options.output} out, {len(rounds)} pairs",
        ["figure", "mean", "95 % from", "to"],
        [
            ["a traced request, additional us of the replica", *extra_us],
            ["finding out whether a request is sampled, us", before_us, before_us, before_us],
            ["a request, us of all processes", whole_us, whole_us, whole_us],
            ["share of the server's processor time, %", *shares],
        ],
    )
    print(f"\n  goal: {GOAL_PERCENT:g} %, {'met' if shares[2] <= GOAL_PERCENT else 'MISSED'}")
    figures = {"extra_us": extra_us, "begin_us": before_us, "request_us": whole_us, "share_percent": shares}
    emit(
        "tracing",
        {"model": model_name(options), "pairs": len(rounds), "goal_percent": GOAL_PERCENT, **figures},
        options,
    )
