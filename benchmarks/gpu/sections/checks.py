"""The tests marked cuda, with a configuration of pytest that needs no plugins. Modules, and parts of
the largest ones, run side by side: most of a test's time is the host's, which compiles."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu import part_of_tests
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

CONFIGURATION = REPOSITORY / "tests" / "gpu" / "pytest.ini"
_LACKS = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_MARK = re.compile(r"^@pytest\.mark\.cuda$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|errors?)")


_MOST_AT_ONCE: Final = 14  # each has a context and tensors on the device
# Into how many parts a module's tests are divided: those that take longest or show most. They begin first.
_PARTS: Final = {
    "test_fused_sampling.py": 1,
    "test_fused_attention.py": 10,
    "test_gpu.py": 3,
    "test_fused_products.py": 12,
}


def files_with_mark() -> list[str]:
    """Test modules that have a test marked cuda, those first that take longest or show most."""
    found = sorted(
        (REPOSITORY / "tests").rglob("test_*.py"),
        key=lambda path: (list(_PARTS).index(path.name) if path.name in _PARTS else len(_PARTS), path),
    )
    return [str(path.relative_to(REPOSITORY)) for path in found if _MARK.search(path.read_text())]


def run(record: Recorder, settings: Settings) -> str:
    """A module that needs a library which is not here is named, and stops no other. Returns those that did not run."""
    parts = [part for file in files_with_mark() for part in _parts_of(file) if not record.has(part.name)]
    with ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, (os.cpu_count() or 1) - 2))) as threads:
        running = {threads.submit(_results, part): part.name for part in parts}
        for ended in as_completed(running):
            record.put(running[ended], ended.result())
    bad = [file for file, counts in record.figures.items() if counts.get("failed") or counts.get("error")]
    if bad:
        raise AssertionError(f"tests fail: {', '.join(bad)}")
    lacking = [f"{file} lacks {counts['lacks']}" for file, counts in record.figures.items() if "lacks" in counts]
    return f"not run: {', '.join(lacking)}" if lacking else ""


@dataclass(frozen=True, slots=True)
class _Part:
    """Every count-th test of a module, from the index."""

    file: str
    index: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        return self.file if self.count == 1 else f"{self.file}, part {self.index + 1} of {self.count}"


def _parts_of(file: str) -> list[_Part]:
    count = _PARTS.get(Path(file).name, 1)
    return [_Part(file, index, count) for index in range(count)]


def _results(part: _Part) -> dict[str, int | str]:
    command = [sys.executable, "-m", "pytest", "-c", str(CONFIGURATION), "--rootdir", ".", "--noconftest", "-m", "cuda"]
    # Installed plugins take most of the start of a process, and no test marked cuda needs one.
    environment = os.environ | {
        part_of_tests.VARIABLE: f"{part.index}/{part.count}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        [*command, "-p", part_of_tests.__name__, part.file],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
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
