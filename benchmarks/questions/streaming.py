"""Processor time of a streamed token and of a request outside the ranks: in the replica, in the proxy, in the rest of Ray.

    python -m benchmarks streaming              all of `make serve`: Ray, Serve, HAProxy
    python -m benchmarks streaming --serve-run  all of plain `serve run CONFIG`: Ray, Serve, Serve's own proxy

There is no model: one rank ends every step after --step-ms (`paced.py`). The load is a closed loop of streaming clients, with a
new connection for each request. Answers of one token give the cost of a request; longer answers, less that cost, give the
cost of a token.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
import yaml

from benchmarks.harness.common import REPOSITORY, Spread, emit, print_table
from benchmarks.harness.load import HttpSession, drive
from benchmarks.harness.options import question_parser
from benchmarks.harness.paced import STEP_MS
from benchmarks.harness.processes import descendants
from benchmarks.harness.programs import Program, end_programs_on_sigterm, free_port, running, write_config
from benchmarks.harness.workload import uniform_batch

MODEL, CHECKPOINT, VOCAB_SIZE, PROMPT = "paced", REPOSITORY / "demo", 1280, 128
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
GOAL_US = 30.0  # processor time of the replica for a token at 32 streams
SEEN = ("output_tok_s", "ttft_p50_ms", "between_p50_ms", "between_p99_ms", "tokens_per_event")
Figures = dict[str, dict[str, float]]  # by figure, then by kind of process


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[Program, str]]:
    """The server with paced ranks, ready for requests, and its URL."""
    port = free_port()
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        path = write_config(Path(directory) / "serve_config.yaml", port, ARGS)
        config = yaml.safe_load(path.read_text())
        config["applications"][0]["import_path"] = "benchmarks.harness.paced:build_app"
        path.write_text(yaml.safe_dump(config))
        with running([*command, str(path)], {"RAY_ADDRESS": "local", "PYTHONPATH": str(REPOSITORY)}) as program:
            url = f"http://127.0.0.1:{port}"
            program.wait_until_answers(url + "/ready")
            yield program, url


def kind_of(pid: int) -> str:
    """replica, proxy (HAProxy alone), or rest of Ray."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    if Path(command.split(" ")[0]).name == "haproxy" or "ray::ProxyActor" in command:
        return "proxy"
    return "replica" if "ray::ServeReplica" in command else "rest of Ray"


def cpu_ns(program: Program) -> dict[tuple[str, int, str], int]:
    """Processor time in nanoseconds of every thread, by its process's kind; /proc/PID/stat has a resolution of 10 ms."""
    found = {}
    for pid in descendants([program.process.pid]):
        with contextlib.suppress(OSError):  # it has just ended
            kind = kind_of(pid)
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                found[kind, pid, thread.name] = int((thread / "schedstat").read_text().split()[0])
    return found


async def measure(program: Program, url: str, clients: int, requests: int, output: int, seed: int) -> dict[str, Any]:
    """The clients' figures, and by kind of process its processor time in seconds."""
    sessions = [HttpSession(url, MODEL, new_connections=True) for _ in range(clients)]
    before = cpu_ns(program)
    load = await drive(sessions, uniform_batch(requests, PROMPT, output, VOCAB_SIZE, seed))
    taken = {"client": load.client_cpu_s, "replica": 0.0, "proxy": 0.0, "rest of Ray": 0.0}
    for thread, ns in cpu_ns(program).items():
        taken[thread[0]] += (ns - before.get(thread, 0)) / 1e9
    figures = load.figures()
    assert not figures["failed"], figures["errors"]
    return figures | {"cpu_s": taken}


async def costs(program: Program, url: str, clients: int, options: argparse.Namespace, seed: int) -> Figures:
    """Processor time in microseconds for each request (of one token) and each further token, by kind of process."""
    rounds = max(2, round(1e3 * options.seconds / (options.output * max(options.step_ms, 0.1 * clients))))
    short_rounds = max(4, round(1e3 * options.seconds / 4 / max(options.step_ms, 1.0 * clients)))
    short = await measure(program, url, clients, clients * short_rounds, 1, seed)
    long = await measure(program, url, clients, clients * rounds, options.output, seed + 1)
    further = 1 - 1 / options.output  # the share of tokens that are not their request's first
    request_us = {kind: 1e6 * taken / short["requests"] for kind, taken in short["cpu_s"].items()}
    token_us = {kind: 1e6 * taken / long["output_tokens"] for kind, taken in long["cpu_s"].items()}
    return {
        "a request, us": request_us,
        "a further token, us": {
            kind: (each - request_us[kind] * (1 - further)) / further for kind, each in token_us.items()
        },
        "a token with its share of a request, us": token_us,
        "cores": {kind: taken / long["seconds"] for kind, taken in long["cpu_s"].items()},
        "seen": {name: long[name] for name in SEEN},
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("streaming", __doc__)
    parser.add_argument("--serve-run", action="store_true", help="through plain `serve run` and Serve's own proxy")
    parser.add_argument("--step-ms", type=float, default=8.0, help="of a step; 0: the rank answers at once")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=6.0, help="about, for each concurrency and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    os.environ[STEP_MS] = str(options.step_ms)  # every process that is started here inherits it
    taken: dict[int, list[Figures]] = {clients: [] for clients in options.concurrency}
    serve_run = [str(Path(sys.executable).parent / "serve"), "run"]
    with started(serve_run if options.serve_run else [sys.executable, "-m", "cli", "up"]) as (program, url):
        uvloop.run(measure(program, url, 8, 32, options.output, 0))  # warms up; not counted
        for repeat in range(options.repeats):
            for clients, rounds in taken.items():
                seed = 1000 * (repeat + 1) + 2 * clients
                rounds.append(uvloop.run(costs(program, url, clients, options, seed)))
    streams = {
        str(clients): {
            figure: {kind: Spread.of(one[figure][kind] for one in rounds) for kind in kinds}
            for figure, kinds in rounds[0].items()
        }
        for clients, rounds in taken.items()
    }
    names = [(figure, kind) for figure, kinds in next(iter(streams.values())).items() for kind in kinds]
    print_table(
        f"Processor time beside the ranks, {options.step_ms:g} ms a step, {PROMPT} tokens in, {options.output} out",
        ["streams", *streams],
        [[f"{figure}: {kind}", *(found[figure][kind] for found in streams.values())] for figure, kind in names],
    )
    about = {"serve_run": options.serve_run, "step_ms": options.step_ms, "output": options.output, "goal_us": GOAL_US}
    emit("streaming", {**about, "streams": streams}, options)
