"""What does `llama-ray batch` cost: tokens a second against `offline`, and time to first token of live clients beside it?

    python -m benchmarks batches --ckpt DIRECTORY --dtype bfloat16
    python -m benchmarks batches --ckpt DIRECTORY --dtype bfloat16 --clients 1 8 --rounds 5

The lines have the lengths of `offline`. Rounds alternate: in process and by the command with a server of its own, from the
first request to the last answer; with --clients, live clients alone and beside a batch of the same server.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.harness.common import REPOSITORY, Spread, emit, print_table
from benchmarks.harness.in_process import built_llama, run
from benchmarks.harness.load import HttpSession, completion_body, drive
from benchmarks.harness.options import (
    add_load_options,
    add_model_options,
    add_server_options,
    model_name,
    question_parser,
)
from benchmarks.harness.programs import end_programs_on_sigterm, free_port, our_server, write_config
from benchmarks.harness.serve_ours import server_args
from benchmarks.harness.workload import mixed_batch, uniform_batch

GOALS = {"of_offline": 0.95, "live_ratio": 1.05}
SLOTS, LONGEST = 32, 512


def write_lines(path: Path, count: int, vocab_size: int) -> None:
    """The lines of a batch: `mixed_batch`, each of exactly as many tokens as it asks for."""
    with path.open("w") as lines:
        for number, request in enumerate(mixed_batch(count, vocab_size)):
            body = completion_body("", request, {"stream": False, "stream_options": None})
            del body["model"]
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            lines.write(json.dumps(line) + "\n")


def batch_command(source: Path, target: Path, *where: str) -> list[str]:
    target.unlink(missing_ok=True)
    return [sys.executable, "-m", "cli", "batch", str(source), "-o", str(target), *where]


def against_offline(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Output tokens a second of both, in turn."""
    source = folder / "lines"
    write_lines(source, options.requests, options.vocab_size)
    limits = {"max_batch_size": SLOTS, "max_seq_len": LONGEST}
    config = write_config(folder / "config.yaml", free_port(), server_args(options, **limits))
    requests = mixed_batch(options.requests, options.vocab_size)
    rates: dict[str, list[float]] = {"offline": [], "batch": []}
    with built_llama(options, dtype=options.dtype, **limits) as llama:
        for _ in range(options.rounds):
            once = run(llama, requests)
            rates["offline"].append(once.num_output / once.seconds)
            command = batch_command(source, folder / "answers", str(config))
            said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stderr
            rates["batch"].append(float(re.findall(r"([\d,]+) tok/s", said)[-1].replace(",", "")))
    ratios = [ours / offline for ours, offline in zip(rates["batch"], rates["offline"], strict=True)]
    return {"of_offline": Spread.of(ratios), **{f"{name}_tok_s": Spread.of(each) for name, each in rates.items()}}


@contextmanager
def batch_beside(folder: Path, url: str) -> Iterator[None]:
    """A batch that has filled the server's slots."""
    target = folder / "answers"
    program = subprocess.Popen(
        batch_command(folder / "lines", target, "--url", url), cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    try:
        while not target.exists() or target.read_bytes().count(b"\n") < SLOTS:
            assert program.poll() is None, "the batch has ended too early: give more --requests"
            time.sleep(0.1)
        yield
        assert program.poll() is None, "the batch has ended too early: give more --requests"
    finally:
        program.terminate()
        program.wait()


def beside(options: argparse.Namespace, folder: Path, url: str) -> dict[str, dict[str, Any]]:
    """Figures of live clients by their number, alone and beside a batch, in turn."""
    write_lines(folder / "lines", options.requests, options.vocab_size)

    def live(clients: int, seed: int) -> dict[str, Any]:
        async def load() -> dict[str, Any]:
            sessions = [HttpSession(url, options.model) for _ in range(clients)]
            count = max(2 * clients, options.live_requests)
            requests = uniform_batch(count, options.prompt, options.output, options.vocab_size, seed)
            try:
                return (await drive(sessions, requests)).figures()
            finally:
                for session in sessions:
                    await session.close()

        return uvloop.run(load())

    found = {}
    for clients in options.clients:
        live(clients, 1)
        rounds = []
        for number in range(options.rounds):
            alone = live(clients, 100 + 2 * number)
            with batch_beside(folder, url):
                rounds.append((alone, live(clients, 101 + 2 * number)))
        found[str(clients)] = {
            "live_ratio": Spread.of(after["ttft_p50_ms"] / before["ttft_p50_ms"] for before, after in rounds),
            "alone_ms": median(before["ttft_p50_ms"] for before, _ in rounds),
            "beside_ms": median(after["ttft_p50_ms"] for _, after in rounds),
            "alone_tok_s": median(before["output_tok_s"] for before, _ in rounds),
            "beside_tok_s": median(after["output_tok_s"] for _, after in rounds),
            "failed": sum(each["failed"] for pair in rounds for each in pair),
        }
    return found


def main(argv: Sequence[str]) -> None:
    parser = question_parser("batches", __doc__)
    add_load_options(parser, prompt=128, output=64, vocab_size=1280)
    parser.add_argument(
        "--clients", type=int, nargs="+", help="live clients beside the batch; without, against offline"
    )
    parser.add_argument("--live-requests", type=int, default=40, help="of the live clients together in each round")
    parser.add_argument("--requests", type=int, default=256, help="lines of the batch")
    parser.add_argument("--rounds", type=int, default=3)
    add_server_options(parser)
    add_model_options(parser)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    with TemporaryDirectory(prefix="llama-bench-") as name:
        if not options.clients:
            figures = against_offline(options, Path(name))
            print_table("Tokens a second", list(figures), [list(figures.values())])
            emit("batches", {"model": model_name(options), "goals": GOALS, **figures}, options)
            return
        with our_server(server_args(options, max_batch_size=SLOTS, max_seq_len=LONGEST)) as (program, url):
            program.wait_until_answers(url + "/ready")
            cases = beside(options, Path(name), url)
    columns = list(next(iter(cases.values())))
    print_table("Time to first token", ["clients", *columns], [(n, *each.values()) for n, each in cases.items()])
    emit("batches", {"model": model_name(options), "goals": GOALS, "cases": cases}, options)
