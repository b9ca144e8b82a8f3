"""Processor time of a streamed token and of a request outside the ranks: in the replica, in the proxy, in the client.

    python -m benchmarks streaming              the replica's HTTP side alone, as Serve runs it, without Ray
    python -m benchmarks streaming --serve      all of `make serve`: Ray, Serve, HAProxy
    python -m benchmarks streaming --serve-run  all of plain `serve run CONFIG`: Ray, Serve, Serve's own proxy

There is no model: one rank in a process of its own ends every step after --step-ms (`paced.py`). The rest is the server's own
code: sockets to the rank, scheduler, engine loop, detokenizer, HTTP application, uvicorn. The load is a closed loop of
streaming clients in another process, with a new connection for each request. Answers of one token give the cost of a request;
longer answers, less that cost, give the cost of a token.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.common import REPOSITORY, Spread, emit, print_table
from benchmarks.harness.load import HttpSession, drive
from benchmarks.harness.options import question_parser
from benchmarks.harness.processes import descendants
from benchmarks.harness.programs import end_programs_on_sigterm, free_port, running, write_config
from benchmarks.harness.workload import uniform_batch

MODEL, CHECKPOINT, VOCAB_SIZE = "paced", REPOSITORY / "demo", 1280
ARGS = {
    "model_id": MODEL,
    "ckpt_dir": str(CHECKPOINT),
    "tokenizer_path": str(CHECKPOINT / "tokenizer.model"),
    "model_parallel_size": 1,
    "max_seq_len": 512,
    "device": "cpu",
    "speculation": False,
    "prefix_caching": False,
}
PROMPT = 128
STEP_MS = "PACED_STEP_MS"
GOAL_US = 30.0  # processor time of the replica for a token at 32 streams
SEEN = ("output_tok_s", "ttft_p50_ms", "between_p50_ms", "between_p99_ms", "tokens_per_event")
Figures = dict[tuple[str, str], float]  # by figure and kind of process
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Target:
    url: str
    processes: Callable[
        [], dict[str, list[int]]
    ]  # by kind, because HAProxy gets a new process whenever it is reconfigured


# The replica's HTTP side alone.


def serve_app(ready: Connection) -> None:
    """The application under uvicorn, in a process of its own, configured as Serve 2.60 does behind HAProxy."""
    import uvicorn
    import uvloop
    from ray.serve._private.http_util import RequestIdMiddleware

    from benchmarks.harness.paced import PacedGroupPool
    from deployments.args import ServerArgs
    from deployments.engine.metrics import Metrics
    from deployments.engine.service import LlamaService
    from deployments.engine.supervisor import GroupPool
    from deployments.http.app import build_http_app

    logging.basicConfig(filename=os.devnull, level=logging.INFO)  # lines are made and written, as in Serve

    async def run() -> None:
        metrics = Metrics(in_ray=False)
        args = ServerArgs.model_validate(ARGS)
        pool: GroupPool = PacedGroupPool()
        service = LlamaService(args, lambda: pool, on_step=metrics.on_step)
        metrics.watch(service)
        await service.start()
        gc.freeze()  # as the deployment does once it serves
        gc.set_threshold(10_000)
        app = RequestIdMiddleware(build_http_app(service, metrics, sends_request_id=False))
        config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", access_log=False, log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for its start)
            await asyncio.sleep(0.01)
        ready.send(server.servers[0].sockets[0].getsockname()[1])
        await serving

    uvloop.run(run())


@contextlib.contextmanager
def app_alone() -> Iterator[Target]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=serve_app, args=(theirs,))
    process.start()
    pid = process.pid
    assert pid is not None
    try:
        if not ours.poll(60):
            sys.exit("the application did not start")
        yield Target(f"http://127.0.0.1:{ours.recv()}", lambda: {"replica": [pid]})
    finally:
        process.terminate()
        process.join(10)


# All of `make serve`, or of plain `serve run`.


@contextlib.contextmanager
def whole_server(command: Sequence[str]) -> Iterator[Target]:
    import yaml

    port = free_port()
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        path = write_config(Path(directory) / "serve_config.yaml", port, ARGS)
        config = yaml.safe_load(path.read_text())
        config["applications"][0]["import_path"] = "benchmarks.harness.paced:build_app"
        path.write_text(yaml.safe_dump(config))
        with running([*command, str(path)], {"RAY_ADDRESS": "local", "PYTHONPATH": str(REPOSITORY)}) as program:
            url = f"http://127.0.0.1:{port}"
            program.wait_until_answers(url + "/ready")
            yield Target(url, lambda: by_kind(sorted(descendants([program.process.pid]))))


def by_kind(pids: Sequence[int]) -> dict[str, list[int]]:
    """A server's processes by kind: replica, proxy (HAProxy alone), all others."""
    kinds: dict[str, list[int]] = {"replica": [], "proxy": [], "rest of Ray": []}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            is_proxy = Path(command.split(" ")[0]).name == "haproxy" or "ray::ProxyActor" in command
            kind = "proxy" if is_proxy else "replica" if "ray::ServeReplica" in command else "rest of Ray"
            kinds[kind].append(pid)
    return kinds


def started(options: argparse.Namespace) -> contextlib.AbstractContextManager[Target]:
    if options.serve_run:
        return whole_server([str(Path(sys.executable).parent / "serve"), "run"])
    return whole_server([sys.executable, "-m", "cli", "up"]) if options.serve else app_alone()


# The client, and the measurement.


def run_client(url: str, orders: Connection) -> None:
    """A client in a process of its own: for each (concurrency, number of requests, output tokens, seed) a load's figures."""
    import uvloop

    async def load(concurrency: int, num_requests: int, num_output: int, seed: int) -> dict[str, Any]:
        sessions = [HttpSession(url, MODEL, new_connections=True) for _ in range(concurrency)]
        done = await drive(sessions, uniform_batch(num_requests, PROMPT, num_output, VOCAB_SIZE, seed))
        return done.figures() | {"client_cpu_s": done.client_cpu_s}

    while (order := orders.recv()) is not None:
        orders.send(uvloop.run(load(*order)))


def cpu_ns(pids: Sequence[int]) -> dict[tuple[int, str], int]:
    """Processor time of every thread in nanoseconds; /proc/PID/stat has a resolution of 10 ms."""
    found = {}
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):  # it has just ended
                found[pid, thread.name] = int((thread / "schedstat").read_text().split()[0])
    return found


def measure(target: Target, client: Connection, order: tuple[int, int, int, int]) -> dict[str, Any]:
    """The client's figures, and by kind of process its processor time in seconds."""
    processes = target.processes()
    before = {kind: cpu_ns(pids) for kind, pids in processes.items()}
    client.send(order)
    figures: dict[str, Any] = client.recv()
    assert not figures["failed"], figures["errors"]
    after = {kind: cpu_ns(pids) for kind, pids in processes.items()}
    taken = {kind: sum(ns - before[kind].get(thread, 0) for thread, ns in after[kind].items()) / 1e9 for kind in after}
    return figures | {"cpu_s": taken | {"client": figures.pop("client_cpu_s")}}


def costs(target: Target, client: Connection, concurrency: int, options: argparse.Namespace, seed: int) -> Figures:
    """Processor time in microseconds for each request (of one token) and each further token, by kind of process."""
    rounds = max(2, round(1e3 * options.seconds / (options.output * max(options.step_ms, 0.1 * concurrency))))
    short_rounds = max(4, round(1e3 * options.seconds / 4 / max(options.step_ms, 1.0 * concurrency)))
    short = measure(target, client, (concurrency, concurrency * short_rounds, 1, seed))
    long = measure(target, client, (concurrency, concurrency * rounds, options.output, seed + 1))
    further = 1 - 1 / options.output  # the share of tokens that are not their request's first
    figures: Figures = {}
    for kind, taken_s in long["cpu_s"].items():
        request_us, token_us = 1e6 * short["cpu_s"][kind] / short["requests"], 1e6 * taken_s / long["output_tokens"]
        figures["a request, us", kind] = request_us
        figures["a further token, us", kind] = (token_us - request_us * (1 - further)) / further
        figures["a token with its share of a request, us", kind] = token_us
        figures["cores", kind] = taken_s / long["seconds"]
    return figures | {("seen", name): long[name] for name in SEEN}


def main(argv: Sequence[str]) -> None:
    parser = question_parser("streaming", __doc__)
    parser.add_argument("--serve", action="store_true", help="through Ray Serve and HAProxy")
    parser.add_argument("--serve-run", action="store_true", help="through plain `serve run` and Serve's own proxy")
    parser.add_argument(
        "--step-ms", type=float, default=8.0, help="milliseconds of a step; 0: the rank answers at once"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=6.0, help="about, for each concurrency and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    os.environ[STEP_MS] = str(options.step_ms)  # every process that is started here inherits it
    taken: dict[int, list[Figures]] = {concurrency: [] for concurrency in options.concurrency}
    with started(options) as target:
        orders, theirs = _SPAWN.Pipe()
        client = _SPAWN.Process(target=run_client, args=(target.url, theirs), daemon=True)
        client.start()
        measure(target, orders, (8, 32, options.output, 0))  # warms up; not counted
        for repeat in range(options.repeats):
            for concurrency, rounds in taken.items():
                rounds.append(costs(target, orders, concurrency, options, seed=1000 * (repeat + 1) + 2 * concurrency))
        orders.send(None)
        client.join(5)

    spreads = {
        str(concurrency): {name: Spread.of(one[name] for one in rounds) for name in rounds[0]}
        for concurrency, rounds in taken.items()
    }
    names = list(next(iter(spreads.values())))
    print_table(
        f"Processor time beside the ranks, {_what(options)}, "
        f"{options.step_ms:g} ms a step, {PROMPT} tokens in, {options.output} out",
        ["streams", *spreads],
        [[": ".join(name), *(figures[name] for figures in spreads.values())] for name in names],
    )
    if "32" in spreads:
        reached = spreads["32"]["a token with its share of a request, us", "replica"].median
        verdict = "met" if reached <= GOAL_US else "MISSED"
        print(f"\n  goal for the replica, a token at 32 streams: {GOAL_US:g} us, {verdict}")
    streams: dict[str, Any] = {}
    for clients, figures in spreads.items():
        for (figure, kind), spread in figures.items():
            streams.setdefault(clients, {}).setdefault(figure, {})[kind] = spread
    about = {
        "serve": options.serve,
        "serve_run": options.serve_run,
        "step_ms": options.step_ms,
        "output": options.output,
        "goal_us": GOAL_US,
    }
    emit("streaming", {**about, "streams": streams}, options)


def _what(options: argparse.Namespace) -> str:
    if options.serve_run:
        return "all of serve run"
    return "all of make serve" if options.serve else "HTTP application alone"
