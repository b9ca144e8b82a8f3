"""Throughput while another process keeps a core busy: the two seconds after its start, compared with the two before.

    python -m benchmarks neighbour --rounds 5 --clients 8

Starts the server on two ranks, puts a closed loop of streaming clients on it, and in each round starts one process that
never sleeps. Two ranks, the clients and that process share the cores: with two cores, an even share is half the throughput.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence

import uvloop

from benchmarks.harness.common import Spread, emit, percentile, print_table
from benchmarks.harness.load import Answer, HttpSession, drive
from benchmarks.harness.options import add_load_options, add_model_options, add_server_options, question_parser
from benchmarks.harness.programs import end_programs_on_sigterm, our_server
from benchmarks.harness.serve_ours import server_args
from benchmarks.harness.window import Window
from benchmarks.harness.workload import Request, uniform_batch

WINDOW_S = 2.0  # measured before and after the neighbour's start
PAUSE_S = 3.0  # between rounds, and before the first


async def rounds(options: argparse.Namespace, url: str) -> tuple[list[tuple[Window, Window]], list[Answer]]:
    """The windows before and after each start of the busy process, and all answers."""
    stopped = False
    batch = uniform_batch(64, options.prompt, options.output, options.vocab_size)

    def requests() -> Iterator[Request]:
        while not stopped:
            yield from batch

    async def neighbours() -> list[tuple[Window, Window]]:
        nonlocal stopped
        windows = []
        for _ in range(options.rounds):
            await asyncio.sleep(PAUSE_S + WINDOW_S)
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
            now = time.perf_counter()
            try:
                await asyncio.sleep(WINDOW_S)
            finally:
                process.kill()
                await process.wait()
            windows.append((Window(now - WINDOW_S, now), Window(now, now + WINDOW_S)))
        stopped = True
        return windows

    sessions = [HttpSession(url, options.model) for _ in range(options.clients)]
    try:
        windows, load = await asyncio.gather(neighbours(), drive(sessions, requests()))
    finally:
        for session in sessions:
            await session.close()
    return windows, load.answers


def main(argv: Sequence[str]) -> None:
    parser = question_parser("neighbour", __doc__)
    add_load_options(parser, prompt=16, output=128, vocab_size=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    add_server_options(parser)
    add_model_options(parser)
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    limits = {"max_seq_len": options.prompt + options.output, "max_batch_size": options.clients}
    args = server_args(options, **limits) | {"model_parallel_size": 2, "cpus_per_rank": 1}
    with our_server(args) as (program, url):
        program.wait_until_answers(url + "/ready")
        windows, answers = uvloop.run(rounds(options, url))
    kept = [after.tokens_per_s(answers) / before.tokens_per_s(answers) for before, after in windows]
    p99s = [[percentile(window.gaps_ms(answers), 99) for window in pair] for pair in windows]
    figures: dict[str, Spread | int] = {
        "tok_s_before": Spread.of(before.tokens_per_s(answers) for before, _ in windows),
        "tok_s_beside": Spread.of(after.tokens_per_s(answers) for _, after in windows),
        "kept": Spread.of(kept),
        "between_p99_ms_before": Spread.of(before for before, _ in p99s),
        "between_p99_ms_beside": Spread.of(after for _, after in p99s),
        "failed": sum(answer.error is not None for answer in answers),
    }
    print_table(
        f"Beside one busy process, {options.clients} clients, the first {WINDOW_S:g} s",
        ["tok/s before", "tok/s beside", "kept", "between p99 ms before", "beside", "failed"],
        [tuple(figures.values())],
    )
    emit("neighbour", figures, options)
