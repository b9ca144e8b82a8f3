"""Ratios of our figures to those of others, measured in alternating rounds of one run, so that noise affects all equally.

    python -m benchmarks paired --question decode --model llama-110m --dtype bfloat16 --peers peers.toml \
        --contenders ours llamacpp vllm --rounds 5

The order of contenders is reversed every other round. Before each turn the machine must be idle; the memory's bandwidth is
probed before and after. A ratio is the first contender's figure by another's of the same round. The medians include rounds in
which the bandwidth changed; the medians of the steady rounds are given too. Servers run throughout; a command is started for
each round.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.bandwidth import BandwidthProbe, NoCompiler
from benchmarks.harness.common import Spread, emit, print_table, wait_quiet
from benchmarks.harness.contenders import (
    DEFAULTS,
    QUESTIONS,
    BadFile,
    Contender,
    Question,
    contender,
    read_recipes,
    values_for,
)
from benchmarks.harness.options import question_parser
from benchmarks.harness.programs import ProgramFailed, end_programs_on_sigterm

OURS = Path(__file__).with_name("ours.toml")
STEADY = 0.1  # bandwidths that differ by less, as a share of the larger, count as equal
PROBE_PASSES = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender in one round: its figures, GB/s before and after, and busy cores before."""

    round: int
    figures: dict[str, float]
    gb_s: tuple[float, float] | None
    busy_cores: float


@dataclass(slots=True)
class Record:
    """All turns of one contender, and the errors of its failed turns."""

    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def figure_of(result: dict[str, Any], name: str) -> float:
    """A figure at the top of a result or in its only case: a number, or the median of a spread. Raises ValueError."""
    cases = result.get("cases", {})
    places = [result, *(cases.values() if isinstance(cases, dict) and len(cases) == 1 else ())]
    for place in places:
        value = place.get(name)
        if isinstance(value, dict):
            value = value.get("median")
        if isinstance(value, int | float):
            return float(value)
    raise ValueError(f"the result has no figure {name}")


def take_turns(
    contenders: Sequence[Contender],
    question: Question,
    num_rounds: int,
    probe: Callable[[], float] | None,
    wait: Callable[[], float],
) -> dict[str, Record]:
    """Ask every contender once a round. A contender that failed in a round is asked again in the next."""
    records = {one.name: Record() for one in contenders}
    for number in range(num_rounds):
        for one in contenders if number % 2 == 0 else reversed(contenders):
            busy = wait()
            before = probe() if probe else 0.0
            try:
                result = one.ask()
                figures = {name: figure_of(result, name) for name in question.figures}
            except (subprocess.SubprocessError, ProgramFailed, ValueError, OSError) as error:
                records[one.name].errors.append(f"round {number + 1}: {error}")
                print(f"  round {number + 1} {one.name}: {error}", file=sys.stderr, flush=True)
                continue
            gb_s = (before, probe()) if probe else None
            records[one.name].turns.append(Turn(number, figures, gb_s, busy))
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            at = f" at {gb_s[0]:.0f} and {gb_s[1]:.0f} GB/s" if gb_s else ""
            print(f"  round {number + 1} {one.name}: {said}{at}", file=sys.stderr, flush=True)
    return records


def ratios(first: Record, other: Record, figure: str, only_steady: bool = False) -> list[float]:
    """first / other of each round in which both have a turn; `only_steady`: of rounds with a steady bandwidth."""
    others = {turn.round: turn for turn in other.turns}
    found = []
    for turn in first.turns:
        peer = others.get(turn.round)
        if peer is None or not peer.figures[figure] or (only_steady and not is_steady(turn, peer)):
            continue
        found.append(turn.figures[figure] / peer.figures[figure])
    return found


def is_steady(*turns: Turn) -> bool:
    """Whether the bandwidth was equal before and after all turns, or was never probed."""
    probed = [gb_s for turn in turns if turn.gb_s for gb_s in turn.gb_s]
    return not probed or (max(probed) - min(probed)) / max(probed) < STEADY


def summary(records: dict[str, Record], question: Question) -> dict[str, Any]:
    """Spreads of every figure, and of the first contender's ratio to each other one."""
    first_name = next(iter(records))
    first = records[first_name]
    contenders = {
        name: {
            **{figure: Spread.of(turn.figures[figure] for turn in record.turns) for figure in question.figures},
            "turns": record.turns,
            "errors": record.errors,
        }
        for name, record in records.items()
        if record.turns
    }
    compared: dict[str, Any] = {}
    for name, record in records.items():
        for figure in question.figures if name != first_name else ():
            every = ratios(first, record, figure)
            steady = ratios(first, record, figure, only_steady=True)
            if every:
                compared.setdefault(name, {})[figure] = {
                    "ratio": Spread.of(every),
                    "steady": Spread.of(steady) if steady else None,
                    "lower_is_better": figure in question.lower_is_better,
                }
    failed = {name: record.errors for name, record in records.items() if record.errors}
    return {"first": first_name, "contenders": contenders, "ratios": compared, "failed": failed}


def print_summary(found: dict[str, Any], question: Question) -> None:
    first = found["first"]
    for figure in question.figures:
        rows = []
        for name, one in found["contenders"].items():
            compared = found["ratios"].get(name, {}).get(figure)
            ratio = compared and compared["ratio"]
            steady = compared and compared["steady"]
            rows.append(
                (
                    name,
                    one[figure],
                    ratio and ratio.median,
                    f"{ratio.least:.2f} .. {ratio.most:.2f}" if ratio else None,
                    f"{steady.median:.3g} ({steady.count} rounds)" if steady else None,
                )
            )
        less = ", less is better" if figure in question.lower_is_better else ""
        print_table(
            f"{figure}{less}",
            ["contender", "median", f"{first} / it", "least .. most", "steady rounds"],
            rows,
        )


def parser_of_options() -> argparse.ArgumentParser:
    parser = question_parser("paired", __doc__)
    parser.add_argument("--question", required=True, choices=QUESTIONS)
    parser.add_argument("--contenders", nargs="+", required=True, metavar="NAME", help="ratios are the first one's")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="files like peers.example.toml")
    parser.add_argument("--model", default="demo", help="one of [models] in the files")
    parser.add_argument(
        "--dtype", default="bfloat16", help="bfloat16, float32, or a weight format: int8, int8_groups, int4, int4_min"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a contender in each round")
    for name in ("prompt", "output", "requests", "concurrency"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one turn")
    parser.add_argument(
        "--quiet-cores", type=float, default=0.25, help="wait until other processes keep fewer cores busy"
    )
    parser.add_argument("--patience-s", type=float, default=120.0, help="seconds to wait for that")
    parser.add_argument("--no-probe", action="store_true", help="do not measure the bandwidth")
    return parser


def main(argv: Sequence[str]) -> None:
    parser = parser_of_options()
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    question = QUESTIONS[options.question]
    given = {name: str(value) for name in DEFAULTS[question.name] if (value := getattr(options, name)) is not None}
    try:
        recipes = read_recipes([OURS, *options.peers])
        values = values_for(
            recipes, options.model, options.dtype, DEFAULTS[question.name] | {"repeats": str(options.repeats)} | given
        )
        if unknown := [name for name in options.contenders if name not in recipes.contenders]:
            raise BadFile(f"no file describes {', '.join(unknown)}; there are {', '.join(recipes.contenders)}")
        with ExitStack() as stack:
            contenders = [
                stack.enter_context(contender(recipes.contenders[name], question, values, options.timeout_s))
                for name in options.contenders
            ]
            records = take_turns(
                contenders,
                question,
                options.rounds,
                None if options.no_probe else _probe,
                lambda: wait_quiet(options.quiet_cores, options.patience_s),
            )
    except (BadFile, NoCompiler, ProgramFailed) as error:
        parser.exit(2, f"{error}\n")
    found = summary(records, question)
    print(
        f"\n{question.name}, {options.model} {options.dtype}, {options.rounds} rounds: medians, and ratios of the rounds"
    )
    print_summary(found, question)
    asked = {name: values[name] for name in ("prompt", "output", "requests", "concurrency", "repeats")}
    emit(
        "paired",
        {
            "question": question.name,
            "model": options.model,
            "dtype": options.dtype,
            "rounds": options.rounds,
            **asked,
            **found,
        },
        options,
    )
    if any(not record.turns for record in records.values()):
        sys.exit(1)


def _probe() -> float:
    """Probe the bandwidth and free the buffer, so that contenders have the memory."""
    with BandwidthProbe() as probe:
        return probe.measure(PROBE_PASSES).gb_s.median
