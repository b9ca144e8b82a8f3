"""Decode speed of one sequence, in process, compared with the time to read the weights once for every token.

    python -m benchmarks decode --ckpt DIRECTORY --dtype bfloat16 float32
    python -m benchmarks decode --repetitive --set speculation=true      what prompt lookup gains

The memory's bandwidth is probed immediately before and after each run, over two buffers: one that no cache holds, and one of as
many bytes as a token reads, of which a processor with a large last cache may keep a part.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.bandwidth import BandwidthProbe
from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import Run, built_llama, bytes_per_token, case_name, run, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import Request, random_prompt, repetitive_prompt


def measure(options: argparse.Namespace, dtype: str) -> tuple[str, dict[str, Any]]:
    """The name and figures of one dtype."""
    length = options.prompt + options.output
    with built_llama(options, dtype=dtype, max_seq_len=length, max_batch_size=1) as llama:
        read = bytes_per_token(llama, options.prompt + options.output / 2)
        make = repetitive_prompt if options.repetitive else random_prompt
        request = Request(make(options.prompt, vocabulary(llama), seed=3), options.output)
        run(llama, [request])  # builds kernels, touches pages
        runs: list[Run] = []
        memory_gb_s: list[tuple[float, float]] = []
        same_size_gb_s: list[tuple[float, float]] = []
        with BandwidthProbe(options.threads) as memory, BandwidthProbe(options.threads, read) as same_size:
            for _ in range(options.repeats):
                before = memory.gb_s(), same_size.gb_s()
                runs.append(run(llama, [request]))
                after = memory.gb_s(), same_size.gb_s()
                memory_gb_s.append((before[0], after[0]))
                same_size_gb_s.append((before[1], after[1]))
        rates = [decoded.decode_tok_s() for decoded in runs]
        return case_name(llama, options), {
            "threads": memory.threads,
            "decode_tok_s": Spread.of(rates),
            "decode_tok_s_all": rates,
            "step_ms": Spread.of(step.ms for decoded in runs for step in decoded.decode_steps),
            "tokens_per_step": runs[-1].num_output / len(runs[-1].steps),
            "bytes_per_token": read,
            "read_gb_s": Spread.of(rate * read / 1e9 for rate in rates),
            "memory_gb_s_before_after": memory_gb_s,
            "same_size_gb_s_before_after": same_size_gb_s,
            "share_of_memory": Spread.of(_shares(rates, read, memory_gb_s)),
            "share_of_same_size": Spread.of(_shares(rates, read, same_size_gb_s)),
        }


def _shares(rates: list[float], read: int, gb_s: list[tuple[float, float]]) -> list[float]:
    """For each run, its rate as a share of the mean bandwidth probed before and after it."""
    return [rate * read / 1e9 / (sum(pair) / 2) for rate, pair in zip(rates, gb_s, strict=True)]


def main(argv: Sequence[str]) -> None:
    parser = question_parser("decode", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repetitive", action="store_true", help="a prompt that repeats 24 tokens")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    cases = dict(measure(options, dtype) for dtype in options.dtype)
    figures = ("decode_tok_s", "step_ms", "bytes_per_token", "read_gb_s", "share_of_memory", "share_of_same_size")
    print_table(
        f"Batch 1, {model_name(options)}, {options.prompt} prompt tokens, {options.output} generated",
        ["weights", "tok/s", "step ms", "bytes a token", "GB/s", "of memory", "of as many bytes"],
        [(name, *(case[figure] for figure in figures)) for name, case in cases.items()],
    )
    load = {"prompt": options.prompt, "output": options.output, "repetitive": options.repetitive}
    emit("decode", {"model": model_name(options), **load, "cases": cases}, options)
