"""The tests marked cuda, with a configuration of pytest that needs no plugins."""

import re
import subprocess
import sys
from functools import partial

from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

CONFIGURATION = REPOSITORY / "tests" / "gpu" / "pytest.ini"
_LACKS = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|errors?)")


_FIRST = ("test_gpu.py", "test_fused_attention.py", "test_fused_sampling.py")


def files_with_mark() -> list[str]:
    """Test modules that have a test marked cuda, those first that show most, should the time end."""
    found = sorted((REPOSITORY / "tests").rglob("test_*.py"), key=lambda path: (path.name not in _FIRST, path))
    return [str(path.relative_to(REPOSITORY)) for path in found if "mark.cuda\n" in path.read_text()]


def run(record: Recorder, settings: Settings) -> str:
    """A module that needs a library which is not here is named, and stops no other. Returns those that did not run."""
    for file in files_with_mark():
        record.measure(file, partial(_results, file))
    bad = [file for file, counts in record.figures.items() if counts.get("failed") or counts.get("error")]
    if bad:
        raise AssertionError(f"tests fail: {', '.join(bad)}")
    lacking = [f"{file} lacks {counts['lacks']}" for file, counts in record.figures.items() if "lacks" in counts]
    return f"not run: {', '.join(lacking)}" if lacking else ""


def _results(file: str) -> dict[str, int | str]:
    command = [sys.executable, "-m", "pytest", "-c", str(CONFIGURATION), "--rootdir", ".", "--noconftest", "-m", "cuda"]
    done = subprocess.run([*command, file], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode == 2 and (lacks := _LACKS.search(done.stdout)):
        return {"lacks": lacks[1]}
    counts: dict[str, int | str] = {
        name.removesuffix("s"): int(count) for count, name in _COUNT.findall(_last_line(done.stdout))
    }
    if done.returncode not in (0, 5):  # 5: no test was selected
        print((done.stdout + done.stderr)[-6000:], flush=True)
        if not counts.get("failed"):
            counts |= {"error": 1, "reason": _last_line(done.stdout + done.stderr)[:200]}
    return counts


def _last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or [""])[-1]
