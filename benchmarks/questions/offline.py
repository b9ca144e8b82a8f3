"""Output tokens a second of a batch: 32 requests of mixed lengths that arrive together, in process.

    python -m benchmarks offline --ckpt DIRECTORY --dtype bfloat16

4,160 prompt tokens and 2,304 output tokens. Only requested tokens count; the clock runs from the first step to the last,
prefill included.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import built_llama, case_name, repeat_runs, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import mixed_batch


def measure(options: argparse.Namespace, dtype: str) -> tuple[str, dict[str, Any]]:
    """The name and figures of one dtype."""
    with built_llama(
        options, dtype=dtype, max_seq_len=options.max_seq_len, max_batch_size=options.max_batch_size
    ) as llama:
        requests = mixed_batch(options.requests, vocabulary(llama))
        runs = repeat_runs(llama, requests, options.repeats)
        rates = [batch.num_output / batch.seconds for batch in runs]
        last = runs[-1]
        return case_name(llama, options), {
            "output_tok_s": Spread.of(rates),
            "output_tok_s_all": rates,
            "seconds": Spread.of(batch.seconds for batch in runs),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "output_tokens": last.num_output,
            "steps": len(last.steps),
            "decode_only_steps": len(last.decode_steps),
            "share_of_time_in_steps": Spread.of(sum(step.ms for step in one.steps) / one.seconds / 1e3 for one in runs),
        }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("offline", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    cases = dict(measure(options, dtype) for dtype in options.dtype)
    one = next(iter(cases.values()))
    print_table(
        f"Offline, {model_name(options)}: {options.requests} requests, {one['prompt_tokens']:,} prompt tokens, "
        f"{one['output_tokens']:,} output tokens",
        ["weights", "useful output tok/s", "seconds", "steps", "of them decode only", "time inside steps"],
        [
            (
                name,
                case["output_tok_s"],
                case["seconds"],
                case["steps"],
                case["decode_only_steps"],
                case["share_of_time_in_steps"],
            )
            for name, case in cases.items()
        ],
    )
    emit("offline", {"model": model_name(options), "requests": options.requests, "cases": cases}, options)
