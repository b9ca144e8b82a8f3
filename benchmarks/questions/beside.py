"""How long does a short request wait beside a long prompt, and the long one beside short requests?

    python -m benchmarks beside --serve --ckpt DIRECTORY
    python -m benchmarks beside --url http://127.0.0.1:8000 --model llama --vocab-size 32000      any OpenAI-compatible server

Each round asks for the long and the short answer alone, and then for both: short requests follow one another while the long
prompt is computed. No two prompts are equal. Times are to the first token, in milliseconds.
"""

import argparse
import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import uvloop

from benchmarks.harness.common import emit, print_table
from benchmarks.harness.load import HttpSession
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

GOALS = {"long_ratio": 1.1}
PAUSE_SHARE = 0.1  # of the long prompt's time alone, before the first short request and between two of them


async def first_token_ms(session: HttpSession, request: Request) -> float:
    await session.ask(request)
    (answer,) = session.answers()
    if answer.error is not None or not answer.token_times:
        raise ValueError(f"a request failed: {answer.error or 'no token came'}")
    return 1e3 * (answer.token_times[0] - answer.began_s)


async def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    sessions = HttpSession(url, options.model), HttpSession(url, options.model)
    seeds: Iterator[int] = itertools.count(1)

    def request(length: int) -> Request:
        return Request(random_prompt(length, options.vocab_size, next(seeds)), options.output)

    times: dict[str, list[float]] = {"short_alone": [], "long_alone": [], "short_beside": [], "long_beside": []}
    try:
        for number in range(1 + options.rounds):
            short_alone = await first_token_ms(sessions[0], request(options.prompt))
            long_alone = await first_token_ms(sessions[0], request(options.long_prompt))
            long = asyncio.create_task(first_token_ms(sessions[0], request(options.long_prompt)))
            beside: list[float] = []
            while len(beside) < options.shorts:
                await asyncio.sleep(PAUSE_SHARE * long_alone / 1e3)
                if long.done():
                    break
                beside.append(await first_token_ms(sessions[1], request(options.prompt)))
            long_beside = await long
            if number:  # the first round warms up
                times["short_alone"].append(short_alone)
                times["long_alone"].append(long_alone)
                times["short_beside"] += beside
                times["long_beside"].append(long_beside)
    finally:
        for session in sessions:
            await session.close()
    found = {f"{name}_p50_ms": median(values) for name, values in times.items()}
    found["short_beside_max_ms"] = max(times["short_beside"])
    found["long_ratio"] = found["long_beside_p50_ms"] / found["long_alone_p50_ms"]
    return found | {"goals": GOALS, "times_ms": times}


def main(argv: Sequence[str]) -> None:
    parser = question_parser("beside", __doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server, without /v1")
    where.add_argument("--serve", action="store_true", help="start and end our server")
    add_load_options(parser, prompt=100, output=4)
    parser.add_argument("--long-prompt", type=int, default=12_000, help="tokens of the long prompt")
    parser.add_argument("--shorts", type=int, default=1, help="short requests beside each long prompt at most")
    parser.add_argument("--rounds", type=int, default=5)
    add_server_options(parser)
    add_model_options(parser)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        url = options.url
        if options.serve:
            end_programs_on_sigterm()
            args = server_args(options, max_seq_len=options.long_prompt + options.output, max_batch_size=8, max_queue=8)
            program, url = stack.enter_context(our_server(args))
            program.wait_until_answers(url + "/ready")
        found = uvloop.run(measure(options, url))
    names = [name for name in found if name not in ("goals", "times_ms")]
    load = f"prompts of {options.prompt} beside {options.long_prompt} tokens"
    print_table(load.capitalize(), names, [[found[name] for name in names]])
    name = model_name(options) if options.serve else options.model
    emit("beside", {"model": name, "load": load, **found}, options)
