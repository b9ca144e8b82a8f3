"""`python -m benchmarks` lists the commands; `python -m benchmarks NAME [options]` runs one, `NAME --help` explains it."""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
# Each command's module has `main(argv)`, which ends by printing its result as one line of JSON where it measures something.
QUESTIONS: Final = sorted(path.stem for path in (_HERE / "questions").glob("[!_]*.py"))
MODULES: Final = {name: f"benchmarks.questions.{name}" for name in QUESTIONS} | {
    "paired": "benchmarks.harness.paired",
    "make_checkpoint": "benchmarks.harness.make_checkpoint",
    "serve_ours": "benchmarks.harness.serve_ours",
    "report": "benchmarks.report",
    "simulate": "benchmarks.simulate.command",
    "autoscale": "benchmarks.simulate.autoscale",
    "cases": "benchmarks.simulate.cases",
    "validate": "benchmarks.simulate.live",
}


def listing() -> str:
    """One line for each command: the first of its module's docstring."""
    lines = ["usage: python -m benchmarks NAME [options]", ""]
    for name, module in MODULES.items():
        source = (_HERE.parent / f"{module.replace('.', '/')}.py").read_text()
        lines.append(f"  {name:<16}{(ast.get_docstring(ast.parse(source)) or '').partition(chr(10))[0]}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return
    if argv[0] not in MODULES:
        sys.exit(f"there is no benchmark {argv[0]}\n\n{listing()}")
    importlib.import_module(MODULES[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
