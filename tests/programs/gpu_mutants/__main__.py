"""Breaks the fused backend in one place at a time and expects its tests to fail: `python -m tests.programs.gpu_mutants`.

Each mutant is a copy of the packages with one text replaced. Exit status 1 if the tests of a mutant pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.programs.gpu_mutants import MUTANTS
from tests.programs.gpu_mutants.mutant import FUSED, Mutant

ROOT = Path(__file__).parents[3]
# Ranks that wait for a collective which never comes are a failure too.
LIMIT_S = 120.0


def is_caught(mutant: Mutant, folder: Path) -> bool:
    """Whether the mutant's tests fail. Raises ValueError if its text does not occur once."""
    path = folder / FUSED / f"{mutant.file}.py"
    text = path.read_text()
    if mutant.old not in text:
        raise ValueError(f"{path.name} has no {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        file, words, *further = mutant.tests
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file, "-k", words, *further]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT_S) == 1
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return True
    finally:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="only mutants whose description has one of these")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if not options.words or any(word in each.fault for word in options.words)]
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
        for part in ("llama_core", "cluster", "deployments", "cli", "tests", "benchmarks", "demo"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for mutant in chosen:
            begin = time.perf_counter()
            caught = is_caught(mutant, folder)
            missed += [] if caught else [mutant]
            print(
                f"{'caught' if caught else 'MISSED'}  {time.perf_counter() - begin:5.1f} s  {mutant.fault}", flush=True
            )
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
