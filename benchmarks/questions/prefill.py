"""Prefill speed: 512 tokens of one sequence, in process, compared with the best matrix product of its dtype and of float32.

python -m benchmarks prefill --ckpt DIRECTORY --dtype bfloat16 float32
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import (
    built_llama,
    case_name,
    prefill_operations,
    repeat_runs,
    torch_dtype,
    vocabulary,
)
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import Request, random_prompt

MATRIX_SIZE = 2048
MATRIX_PASSES = 10
FIRST_SIZE, SLOW_GFLOP_S = 512, 5.0


def matmul_gflops(dtype: torch.dtype, size: int, passes: int) -> Spread | None:
    """10^9 operations a second of one product of two square matrices with `size` rows, on as many threads as torch has.

    None where torch has no fast kernel of that dtype for this CPU: without AVX-512, a product of 2048^3 in bfloat16 takes half
    a minute.
    """
    if dtype != torch.float32 and 2 * FIRST_SIZE**3 / min(product_seconds(dtype, FIRST_SIZE, 3)) < SLOW_GFLOP_S * 1e9:
        return None
    return Spread.of(2 * size**3 / each / 1e9 for each in product_seconds(dtype, size, passes))


def product_seconds(dtype: torch.dtype, size: int, passes: int) -> list[float]:
    """Of each pass but the first, which builds the kernel."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(passes + 1):
        begin = time.perf_counter()
        torch.matmul(left, right)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def measure(options: argparse.Namespace, dtype: str) -> tuple[str, dict[str, Any]]:
    """The name and figures of one dtype. The prompt is computed in one step unless --max-step-tokens is set."""
    step_tokens = options.max_step_tokens or options.prompt
    with built_llama(
        options, dtype=dtype, max_seq_len=options.prompt + 2, max_batch_size=1, max_step_tokens=step_tokens
    ) as llama:
        request = Request(random_prompt(options.prompt, vocabulary(llama), seed=3), 1)
        operations = prefill_operations(llama.runner.model_config, options.prompt)
        # Some CPUs multiply matrices of float32 faster than those of bfloat16.
        products = (matmul_gflops(dtype, MATRIX_SIZE, MATRIX_PASSES) for dtype in {torch_dtype(llama), torch.float32})
        peak = max(filter(None, products), key=lambda product: product.median)
        runs = repeat_runs(llama, [request], options.repeats)
        # From the beginning of the first step to the first token.
        seconds = [prefill.steps[-1].end_s - prefill.steps[0].begin_s for prefill in runs]
        gflop_s = [operations / each / 1e9 for each in seconds]
        return case_name(llama, options), {
            "threads": torch.get_num_threads(),
            "prefill_tok_s": Spread.of(options.prompt / each for each in seconds),
            "prefill_tok_s_all": [options.prompt / each for each in seconds],
            "ms": Spread.of(each * 1e3 for each in seconds),
            "gflop": operations / 1e9,
            "gflop_s": Spread.of(gflop_s),
            "matmul_gflop_s": peak,
            "share_of_matmul": Spread.of(rate / peak.median for rate in gflop_s),
        }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("prefill", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--max-step-tokens", type=int, help="split the prompt into chunks of so many tokens")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    cases = dict(measure(options, dtype) for dtype in options.dtype)
    figures = ("prefill_tok_s", "ms", "gflop_s", "matmul_gflop_s", "share_of_matmul")
    print_table(
        f"Prefill, {model_name(options)}, {options.prompt} tokens",
        ["weights", "tok/s", "ms", "GFLOP/s", f"matmul {MATRIX_SIZE}^3", "share"],
        [(name, *(case[figure] for figure in figures)) for name, case in cases.items()],
    )
    emit("prefill", {"model": model_name(options), "prompt": options.prompt, "cases": cases}, options)
