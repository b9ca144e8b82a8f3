"""Ratios of our figures to those of others, measured in alternating rounds of one run, so that noise affects all equally.

    python -m benchmarks paired --question decode --model llama-110m --peers peers.toml --contenders ours llamacpp vllm
    python -m benchmarks paired --question online --concurrency 32 --model llama-110m --peers peers.toml \
        --contenders ours-http --old ../old --rounds 20

The order of contenders is reversed every other round. Before each turn the machine must be idle. A ratio is the first
contender's figure by another's of the same round. A command or server is started for each turn. `--old` adds the last contender
once more, as another checkout of this project has it: its commands run there, with that checkout's .venv.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.common import Spread, as_json, emit, interval, print_table, shown, wait_quiet
from benchmarks.harness.contenders import QUESTIONS, BadFile, Contender, read_recipes, values_for
from benchmarks.harness.options import question_parser
from benchmarks.harness.programs import ProgramFailed, end_programs_on_sigterm

OURS = Path(__file__).with_name("ours.toml")


class Asked(Protocol):
    @property
    def name(self) -> str: ...

    def ask(self, seed: int) -> dict[str, Any]: ...


@dataclass(slots=True)
class Record:
    """One contender's figures by round, and the errors of its failed turns."""

    turns: dict[int, dict[str, float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def figure_of(result: Mapping[str, Any], name: str) -> float:
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
    contenders: Sequence[Asked], figures: Sequence[str], num_rounds: int, wait: Callable[[], object]
) -> dict[str, Record]:
    """Ask every contender once a round. A contender that failed in a round is asked again in the next."""
    records = {one.name: Record() for one in contenders}
    for number in range(num_rounds):
        for one in contenders if number % 2 == 0 else reversed(contenders):
            wait()
            try:
                result = one.ask(number + 1)
                found = {name: figure_of(result, name) for name in figures}
            except (subprocess.SubprocessError, ProgramFailed, ValueError, OSError) as error:
                records[one.name].errors.append(f"round {number + 1}: {error}")
                said = str(error)
            else:
                records[one.name].turns[number] = found
                said = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            print(f"  round {number + 1} {one.name}: {said}", file=sys.stderr, flush=True)
    return records


def ratios(first: Record, other: Record, figure: str) -> list[float]:
    """first / other of each round in which both have a turn."""
    both = [(mine, other.turns[number]) for number, mine in first.turns.items() if number in other.turns]
    return [mine[figure] / theirs[figure] for mine, theirs in both if theirs[figure]]


def summary(records: Mapping[str, Record], figures: Sequence[str]) -> dict[str, Any]:
    """Spreads of every figure, and the first contender's ratio to each other one: its spread, its mean and its interval."""
    (first, mine), *others = records.items()
    contenders = {
        name: {figure: Spread.of(turn[figure] for turn in record.turns.values()) for figure in figures}
        for name, record in records.items()
        if record.turns
    }
    compared: dict[str, Any] = {}
    for name, record in others:
        for figure in figures:
            if found := ratios(mine, record, figure):
                compared.setdefault(name, {})[figure] = {
                    "ratio": Spread.of(found),
                    "interval": interval(found) if len(found) > 1 else None,
                    "lower_is_better": figure.endswith("_ms"),
                }
    failed = {name: record.errors for name, record in records.items() if record.errors}
    return {"first": first, "contenders": contenders, "ratios": compared, "failed": failed}


COLUMNS = ("figure", "first", "other", "ratio", "least .. most", "mean (95 % interval)")


def rows_of(found: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """A row of COLUMNS for each figure of each contender but the first, of a summary as JSON has it."""
    rows: list[tuple[object, ...]] = []
    first = found["first"]
    for name, figures in found["ratios"].items():
        for figure, one in figures.items():
            ratio, mean = one["ratio"], one.get("interval")  # missing in older results
            rows.append(
                (
                    f"{figure}{' (less is better)' * one['lower_is_better']}",
                    f"{first} {shown(found['contenders'][first][figure])}",
                    f"{name} {shown(found['contenders'][name][figure])}",
                    f"**{ratio['median']:.2f}**",
                    f"{ratio['least']:.2f} .. {ratio['most']:.2f}",
                    f"{mean['mean']:.3f} ({mean['low']:.3f} .. {mean['high']:.3f})" if mean else None,
                )
            )
    return rows


def main(argv: Sequence[str]) -> None:
    parser = question_parser("paired", __doc__)
    parser.add_argument("--question", required=True, choices=QUESTIONS)
    parser.add_argument("--contenders", nargs="+", required=True, metavar="NAME", help="ratios are the first one's")
    parser.add_argument(
        "--old", type=Path, metavar="DIR", help="another checkout, which the last contender runs in too"
    )
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="files like peers.example.toml")
    parser.add_argument("--model", default="demo", help="one of [models] in the files")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float32, or a weight format such as int4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a command in each round")
    for name in ("prompt", "output", "requests", "concurrency", "rate"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--bench-python", default=sys.executable, help="one that can import vLLM, for arrivals")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one turn")
    parser.add_argument("--quiet-cores", type=float, default=0.25, help="wait until others keep fewer cores busy")
    parser.add_argument("--patience-s", type=float, default=120.0, help="seconds to wait for that")
    options = parser.parse_args(argv)
    end_programs_on_sigterm()
    question = QUESTIONS[options.question]
    asked = {name: given for name in ("prompt", "output", "requests", "concurrency", "rate")
             if (given := getattr(options, name) or question.defaults.get(name))}  # fmt: skip
    asked["repeats"] = str(options.repeats)
    try:
        recipes = read_recipes([OURS, *options.peers])
        values = values_for(recipes, options.model, options.dtype, asked | {"bench_python": options.bench_python})
        if unknown := [name for name in options.contenders if name not in recipes.contenders]:
            raise BadFile(f"no file describes {', '.join(unknown)}; there are {', '.join(recipes.contenders)}")
        chosen = [recipes.contenders[name] for name in options.contenders]
        if options.old:
            chosen.append(replace(chosen[-1], name="old", checkout=options.old.resolve(strict=True)))
        contenders = [Contender(recipe, options.question, values, options.timeout_s) for recipe in chosen]
        records = take_turns(
            contenders,
            question.figures,
            options.rounds,
            lambda: wait_quiet(options.quiet_cores, options.patience_s),
        )
    except (BadFile, OSError) as error:
        parser.exit(2, f"{error}\n")
    about = {"question": options.question, "model": options.model, "dtype": options.dtype, "rounds": options.rounds}
    found = as_json(summary(records, question.figures))
    print_table(", ".join(map(str, about.values())) + " rounds", COLUMNS, rows_of(found))
    emit("paired", about | asked | found, options)
    if any(not record.turns for record in records.values()):
        sys.exit(1)
