"""Output tokens a second, time to the first token and time between tokens, measured by clients of a server.

    python -m benchmarks online --url http://127.0.0.1:8000 --model llama-demo     a running server
    python -m benchmarks online --serve --ckpt DIRECTORY                           ours, started and ended here

Closed loop: each of `--concurrency` clients has one streaming request at a time. All prompts differ. The table shows the
processor time of the client, which shares the server's cores.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import uvloop

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.load import HttpSession, drive
from benchmarks.harness.options import add_load_options, add_model_options, add_server_options, question_parser
from benchmarks.harness.programs import end_programs_on_sigterm, our_server
from benchmarks.harness.serve_ours import server_args
from benchmarks.harness.workload import Request, mixed_batch, uniform_batch

FIGURES = ("output_tok_s", "requests_s", "ttft_p50_ms", "ttft_p99_ms", "between_p50_ms", "between_p99_ms")
BESIDE = ("decode_tok_s", "per_token_p50_ms", "tokens_per_event", "client_cpu_cores")  # only in the JSON result


async def one_load(new_session: Callable[[], HttpSession], requests: list[Request], concurrency: int) -> dict[str, Any]:
    sessions = [new_session() for _ in range(concurrency)]
    try:
        return (await drive(sessions, requests)).figures()
    finally:
        for session in sessions:
            await session.close()


def requests_of(options: argparse.Namespace, count: int, seed: int) -> list[Request]:
    if options.mixed:
        return mixed_batch(count, options.vocab_size, seed)
    return uniform_batch(count, options.prompt, options.output, options.vocab_size, seed)


async def measure(options: argparse.Namespace, url: str) -> dict[str, dict[str, Any]]:
    """Figures by concurrency, each with its spread over the repeats."""
    found: dict[str, dict[str, Any]] = {}

    def new_session() -> HttpSession:
        return HttpSession(url, options.model, json.loads(options.extra))

    for concurrency, count in zip(options.concurrency, options.requests, strict=True):
        seed = 100 * options.seed
        await one_load(new_session, requests_of(options, concurrency, seed), concurrency)
        runs = [
            await one_load(new_session, requests_of(options, count, seed + 1 + repeat), concurrency)
            for repeat in range(options.repeats)
        ]
        found[str(concurrency)] = {
            **{name: Spread.of(one[name] for one in runs) for name in (*FIGURES, *BESIDE)},
            "requests": count,
            "failed": sum(one["failed"] for one in runs),
            "errors": sorted({error for one in runs for error in one["errors"]})[:3],
        }
    return found


def main(argv: Sequence[str]) -> None:
    parser = question_parser("online", __doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server, without /v1")
    where.add_argument("--serve", action="store_true", help="start and end our server")
    add_load_options(parser, prompt=128, output=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, nargs="+", default=[12, 64, 128], help="one for each concurrency")
    parser.add_argument("--mixed", action="store_true", help="the lengths of offline instead")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--extra", default="{}", metavar="JSON", help="further fields of every request")
    add_server_options(parser)
    add_model_options(parser)
    options = parser.parse_args(argv)
    if len(options.requests) != len(options.concurrency):
        parser.error("--requests takes one number for each --concurrency")
    with ExitStack() as stack:
        url = options.url
        if options.serve:
            end_programs_on_sigterm()
            longest = max(len(request.prompt) + request.num_output for request in requests_of(options, 8, 1))
            args = server_args(options, max_seq_len=longest, max_batch_size=max(options.concurrency))
            program, url = stack.enter_context(our_server(args))
            program.wait_until_answers(url + "/ready")
        cases = uvloop.run(measure(options, url))
    load = "mixed lengths" if options.mixed else f"prompt {options.prompt}, output {options.output}"
    print_table(
        f"Online, {load}",
        ["clients", "output tok/s", "req/s", "TTFT p50 ms", "p99", "between p50 ms", "p99", "client's cores", "failed"],
        [
            (clients, *(case[name] for name in FIGURES), case["client_cpu_cores"], case["failed"])
            for clients, case in cases.items()
        ],
    )
    emit("online", {"load": load, "model": options.model, "cases": cases}, options)
    if any(case["failed"] for case in cases.values()):
        sys.exit(1)  # with failed requests the load was another one
