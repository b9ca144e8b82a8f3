"""On one CUDA device, without Ray: tests, speed, kernels, memory, recovery and other engines, in half an hour; then on several.

    python -m benchmarks gpu                        Llama-2-7B's shape, random weights in bfloat16
    python -m benchmarks gpu --minutes 13           the sections that matter most, in shorter forms
    python -m benchmarks gpu --only decode mixed    some sections
    python -m benchmarks gpu --device cpu --tiny --shape tiny --dtype float32 --vocab-size 300     shows that all of it runs

Prints every figure when it has it. A run that was cut goes on where it was; --fresh begins anew.
"""

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page
from benchmarks.gpu.plan import NAMES, SECTIONS, TOTAL_S, sections_within
from benchmarks.gpu.program import CannotRun, Launch, describe, launch_process, open_states, run_sections, stored
from benchmarks.gpu.recorder import median
from benchmarks.gpu.settings import add_settings, settings_of
from benchmarks.harness.common import REPOSITORY, emit, machine
from benchmarks.harness.options import question_parser


def main(argv: Sequence[str]) -> None:
    parser = question_parser("gpu", __doc__)
    add_settings(parser)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="SECTION", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all sections; the rest runs next time")
    parser.add_argument(
        "--minutes", type=float, help="for all: below 30, the sections that matter most come first, in shorter forms"
    )
    state = parser.add_mutually_exclusive_group()
    state.add_argument("--resume", action="store_true", help="keep what an earlier run has measured; the default")
    state.add_argument("--fresh", action="store_true", help="forget what an earlier run has measured")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "benchmarks" / "results", help="folder for gpu_DEVICE.json and .md"
    )
    options = parser.parse_args(argv)
    if options.minutes:
        options.seconds = min(options.seconds, 60 * options.minutes)
        options.short = options.short or options.seconds < TOTAL_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section ends too
    try:
        measured(options, launch_process(settings_of(options)))
    except CannotRun as error:
        parser.exit(2, f"{error}\n")


def measured(options: argparse.Namespace, launch: Launch) -> dict[str, Any]:
    """Run what is missing, write the JSON and the page, and print the result. Raises CannotRun."""
    begin, settings = time.monotonic(), settings_of(options)
    states = options.out / "gpu_state"
    states.mkdir(parents=True, exist_ok=True)
    device = describe(states, launch)
    identity = {"device": device["device"], "settings": settings.as_data(), "commit": machine()["commit"]}
    open_states(states, identity, is_fresh=options.fresh)
    sections = sections_within(options.minutes) if options.minutes else SECTIONS
    wanted = [section for section in sections if not options.only or section.name in options.only]
    run_sections(wanted, states, options.seconds, launch, begin)
    found = {section.name: stored(section, states) for section in SECTIONS}  # those of earlier runs too
    figures = {"settings": settings.as_data(), **device, "sections": found, **summary(found)}
    name = "_".join(["gpu", *re.findall(r"[a-z0-9]+", device["device"].lower())])
    options.json = options.json or options.out / f"{name}.json"
    result = emit("gpu", figures, options)
    (options.out / f"{name}.md").write_text(page(result))
    return result


def summary(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures that stand for the run; None where a section has not measured its own."""

    def of(section: str, *path: str) -> float | None:
        value: Any = sections[section]["figures"]
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return median(value)

    ours, theirs = of("offline", "output_tok_s"), of("transformers", "output_tok_s")
    theirs_at_most = of("transformers", "output_tok_s_at_most")
    floor, step = of("decode", "decode_64", "floor_ms"), of("decode", "decode_64", "step_ms")
    return {
        "summary": {
            "batch_1_tok_s": of("decode", "decode_1", "tok_s"),
            "batch_1_share": of("decode", "decode_1", "share_of_bandwidth"),
            "batch_64_of_floor": step / floor if step and floor else None,
            "prompt_share": of("decode", "prompt", "share_of_products"),
            "offline_tok_s": ours,
            "offline_ratio": ours / theirs if ours and theirs else None,
            "offline_ratio_at_least": ours / theirs_at_most if ours and theirs_at_most else None,
            "kill_to_token_s": of("recovery", "kill_to_token_s"),
            "taken_of_plan": of("memory", "taken_of_plan"),
            "two_ranks_speedup": of("ranks", "2_ranks_speedup", "rows_1_ms"),
        }
    }
