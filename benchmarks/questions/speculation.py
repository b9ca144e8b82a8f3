"""Gain and cost of prompt lookup: one sequence with and without it, on repetitive and on random text.

    python -m benchmarks speculation --ckpt DIRECTORY

The prompt of "repeats" is one piece repeated, that of "random" has no pattern. Generated text may repeat itself too, less
often with sampling (--temperature 1) than with greedy decoding of a small or random model. The tokens must be the same with
and without prompt lookup.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import built_llama, case_name, run, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import Request, random_prompt, repetitive_prompt


def measure(options: argparse.Namespace, drafting: bool) -> dict[str, dict[str, Any]]:
    """Figures by text, with or without drafts."""
    found: dict[str, dict[str, Any]] = {}
    with built_llama(
        options,
        dtype=options.dtype,
        max_seq_len=options.prompt + options.output,
        max_batch_size=1,
        speculation=drafting,
    ) as llama:
        prompts = {
            "repeats": repetitive_prompt(options.prompt, vocabulary(llama), seed=5),
            "random": random_prompt(options.prompt, vocabulary(llama), seed=5),
        }
        for text, prompt in prompts.items():
            for temperature in options.temperature:
                request = Request(prompt, options.output)
                runs = [run(llama, [request], temperature) for _ in range(options.repeats + 1)][1:]
                # Each run is timed from its first token to its last.
                rates = [(options.output - 1) / (one.end_s - one.prefill_steps[-1].end_s) for one in runs]
                found[f"{text}, temperature {temperature:g}"] = {
                    "decode_tok_s": Spread.of(rates),
                    "tokens_per_step": (options.output - 1) / len(runs[0].decode_steps),
                    "tokens": runs[0].outputs[0],
                    "weights": case_name(llama, options),
                }
    return found


def main(argv: Sequence[str]) -> None:
    parser = question_parser("speculation", __doc__)
    add_model_options(parser)
    # In float32 a token does not depend on which rows are computed together.
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    drafting, plain = measure(options, True), measure(options, False)
    cases = {}
    for text, one in drafting.items():
        other = plain[text]
        cases[text] = {
            "with": one["decode_tok_s"],
            "without": other["decode_tok_s"],
            "ratio": one["decode_tok_s"].median / other["decode_tok_s"].median,
            "tokens_per_step": one["tokens_per_step"],
            "same_tokens": one["tokens"] == other["tokens"],
        }
    weights = next(iter(drafting.values()))["weights"]
    print_table(
        f"Prompt lookup, {model_name(options)} {weights}, {options.prompt} prompt tokens, {options.output} generated",
        ["text", "tok/s with", "without", "ratio", "tokens a step", "tokens"],
        [
            (
                text,
                case["with"],
                case["without"],
                case["ratio"],
                case["tokens_per_step"],
                "same" if case["same_tokens"] else "DIFFER",
            )
            for text, case in cases.items()
        ],
    )
    emit("speculation", {"model": model_name(options), "weights": weights, "cases": cases}, options)
