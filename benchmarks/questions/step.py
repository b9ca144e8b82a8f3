"""The time of each part of a decode step, compared with the time to read the part's bytes.

    python -m benchmarks step --ckpt DIRECTORY --rows 1 8 32 --context 128
    python -m benchmarks step --operators 20      torch's profile: the slowest operators

The least time of a part is the time to read its bytes (weights once for all rows, keys and values for each row) at the
bandwidth of a buffer as large as what the step reads, probed around the runs. With many rows a part is bound by arithmetic
and takes longer.
"""

import argparse
import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.anatomy import ATTENTION, BETWEEN, dissected, least_bytes, weights_of_a_step
from benchmarks.harness.bandwidth import BandwidthProbe
from benchmarks.harness.common import Spread, emit, print_table
from benchmarks.harness.in_process import built_llama, bytes_per_token, case_name, run, torch_dtype, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import Request, uniform_batch
from llama_core import Llama
from llama_core.scheduling.step import StepInput

PROBE_PASSES = 8


def measure(llama: Llama, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """One number of rows: each part's milliseconds, and its least time."""
    requests = uniform_batch(rows, options.context, options.steps + 1, vocabulary(llama))
    run(llama, requests)  # builds kernels, touches pages
    repeats: list[dict[str, float]] = []
    plain: list[float] = []
    config = llama.runner.model_config
    weight_bytes = bytes_per_token(llama, 0) / weights_of_a_step(config)  # quantized or not
    cache_bytes = torch_dtype(llama).itemsize
    read = least_bytes(config, weight_bytes, cache_bytes, rows, options.context + options.steps / 2)
    whole = bytes_per_token(llama, 0) + read[ATTENTION]
    with BandwidthProbe(options.threads, whole) as probe:
        bandwidth = [probe.measure(PROBE_PASSES).gb_s.median]
        for _ in range(options.repeats):
            plain += [step.ms for step in run(llama, requests).decode_steps if step.num_rows == rows]
            repeats.append(_parts(llama, requests))
            bandwidth.append(probe.measure(PROBE_PASSES).gb_s.median)
    gb_s = Spread.of(bandwidth)
    parts: list[dict[str, Any]] = [
        {
            "part": part,
            "ms": Spread.of(repeat[part] for repeat in repeats),
            "read_bytes": read.get(part, 0),
            "least_ms": read.get(part, 0) / gb_s.median / 1e6,
        }
        for part in repeats[0]
        if any(repeat[part] for repeat in repeats)
    ]
    return {
        "rows": rows,
        "context": options.context,
        "parts": parts,
        "step_ms": Spread.of(plain),
        "read_bytes": whole,
        "least_ms": whole / gb_s.median / 1e6,
        "gb_s": gb_s,
    }


def _parts(llama: Llama, requests: list[Request]) -> dict[str, float]:
    """Milliseconds of each part of a decode step of all `requests`, and of the time between two steps: means of one run."""

    def is_whole_decode(batch: StepInput) -> bool:
        return len(batch.rows) == len(requests) and all(row.length == 1 for row in batch.rows)

    with dissected(llama.runner, is_whole_decode) as steps:
        decodes = run(llama, requests).decode_steps
    gaps = [later.begin_s - earlier.end_s for earlier, later in itertools.pairwise(decodes)]
    # During the first decode step the caches still hold data of the prefill.
    return {part: fmean(step[part] for step in steps[1:]) for part in steps[0]} | {BETWEEN: 1e3 * fmean(gaps)}


def print_operators(llama: Llama, options: argparse.Namespace, rows: int) -> None:
    """torch's table of the slowest operators of a batch's decode."""
    requests = uniform_batch(rows, options.context, options.steps + 1, vocabulary(llama))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(llama, requests)
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.operators))


def main(argv: Sequence[str]) -> None:
    parser = question_parser("step", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--operators", type=int, metavar="N", help="also print the N slowest operators")
    options = parser.parse_args(argv)
    with built_llama(
        options,
        dtype=options.dtype,
        max_seq_len=options.context + options.steps + 1,
        max_batch_size=max(options.rows),
    ) as llama:
        cases = [measure(llama, options, rows) for rows in options.rows]
        name = case_name(llama, options)
        for rows in options.rows if options.operators else []:
            print_operators(llama, options, rows)
    for case in cases:
        print_table(
            f"A decode step of {case['rows']} rows, {model_name(options)} {name}, context {options.context}: "
            f"{case['step_ms']} ms, least {case['least_ms']:.2f} ms at {case['gb_s']} GB/s",
            ["part", "ms", "MB read", "least ms"],
            [(part["part"], part["ms"], part["read_bytes"] / 1e6, part["least_ms"]) for part in case["parts"]],
        )
    emit("step", {"model": model_name(options), "weights": name, "cases": cases}, options)
