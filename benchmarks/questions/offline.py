"""Output tokens a second of a batch: 32 requests of mixed lengths that arrive together, in process.

    python -m benchmarks offline --ckpt DIRECTORY --dtype bfloat16
    python -m benchmarks offline --shared 400 --set prefix_caching=true     what a shared prefix saves

Without --shared, 4,160 prompt tokens and 2,304 output tokens. Only requested tokens count; the clock runs from the first step
to the last, prefill included.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import built_llama, case_name, repeat_runs, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import mixed_batch, shared_prefix_batch


def measure(options: argparse.Namespace, dtype: str) -> tuple[str, dict[str, Any]]:
    """The name and figures of one dtype."""
    with built_llama(
        options, dtype=dtype, max_seq_len=options.max_seq_len, max_batch_size=options.max_batch_size
    ) as llama:
        count, words = options.requests, vocabulary(llama)
        shared = options.shared
        requests = shared_prefix_batch(count, shared, 16, 16, words) if shared else mixed_batch(count, words)
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
            "computed_tokens": sum(step.num_tokens for step in last.steps),
            "share_of_time_in_steps": Spread.of(sum(step.ms for step in one.steps) / one.seconds / 1e3 for one in runs),
        }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("offline", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, help="tokens that all prompts begin with; 16 of their own, 16 of output")
    parser.add_argument("--max-batch-size", type=int, default=32)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    cases = dict(measure(options, dtype) for dtype in options.dtype)
    one = next(iter(cases.values()))
    figures = ("output_tok_s", "seconds", "steps", "computed_tokens", "share_of_time_in_steps")
    print_table(
        f"Offline, {model_name(options)}: {options.requests} requests, {one['prompt_tokens']:,} prompt tokens, "
        f"{one['output_tokens']:,} output tokens",
        ["weights", "output tok/s", "seconds", "steps", "tokens computed", "time inside steps"],
        [(name, *(case[figure] for figure in figures)) for name, case in cases.items()],
    )
    load = {"requests": options.requests, "shared": options.shared}
    emit("offline", {"model": model_name(options), **load, "cases": cases}, options)
