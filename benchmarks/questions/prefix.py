"""The savings of prefix caching: 32 requests with one prefix of 400 tokens, with and without the cache.

    python -m benchmarks prefix --ckpt DIRECTORY

Counts the prompt tokens that the model computed, times the run, and checks that every request got the same tokens.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import Run, built_llama, case_name, run, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import shared_prefix_batch
from llama_core import Llama


def prefilled(batch: Run) -> int:
    """Prompt tokens that were computed: rows that read a prompt, less the decode rows beside them."""
    sampled = sum(step.num_samples for step in batch.steps)
    return sum(step.num_tokens for step in batch.steps) - sampled + len(batch.outputs)


def measure(llama: Llama, options: argparse.Namespace) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures and the generated tokens."""
    requests = shared_prefix_batch(options.requests, options.shared, options.own, options.output, vocabulary(llama))
    runs = [run(llama, requests) for _ in range(options.repeats)]
    return {
        "prefill_tokens": prefilled(runs[0]),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "seconds": Spread.of(batch.seconds for batch in runs),
        "output_tok_s": Spread.of(batch.num_output / batch.seconds for batch in runs),
    }, runs[0].outputs


def main(argv: Sequence[str]) -> None:
    parser = question_parser("prefix", __doc__)
    add_model_options(parser)
    # In float32 a token does not depend on which rows are computed together.
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=400, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=16, help="further tokens of each prompt")
    parser.add_argument("--output", type=int, default=16, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    cases: dict[str, dict[str, Any]] = {}
    outputs: dict[str, list[list[int]]] = {}
    for name, sharing in (("shared", True), ("not shared", False)):
        with built_llama(
            options,
            dtype=options.dtype,
            max_seq_len=options.shared + options.own + options.output,
            max_batch_size=options.requests,
            prefix_caching=sharing,
        ) as llama:
            cases[name], outputs[name] = measure(llama, options)
            weights = case_name(llama, options)
    same = outputs["shared"] == outputs["not shared"]
    fewer = cases["not shared"]["prefill_tokens"] / cases["shared"]["prefill_tokens"]
    faster = cases["not shared"]["seconds"].median / cases["shared"]["seconds"].median
    print_table(
        f"{options.requests} requests behind {options.shared} shared tokens, {model_name(options)} {weights}",
        ["prefix", "prompt tokens", "of them computed", "seconds", "useful output tok/s"],
        [
            (name, case["prompt_tokens"], case["prefill_tokens"], case["seconds"], case["output_tok_s"])
            for name, case in cases.items()
        ],
    )
    print(f"  {fewer:.1f}x fewer prompt tokens computed, {faster:.2f}x faster; texts {'same' if same else 'DIFFER'}")
    emit(
        "prefix",
        {
            "model": model_name(options),
            "weights": weights,
            "shared_tokens": options.shared,
            "requests": options.requests,
            "cases": cases,
            "fewer_prefill_tokens": fewer,
            "faster": faster,
            "same_tokens": same,
        },
        options,
    )
