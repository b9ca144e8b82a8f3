"""The tests marked cuda, with a configuration of pytest that needs no plugins.

Modules, and parts of the largest ones, run side by side: most of a test's time is the host's, which compiles.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

import pytest

from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

CONFIGURATION = REPOSITORY / "tests" / "gpu" / "pytest.ini"
_LACKS = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_MARK = re.compile(r"^@pytest\.mark\.cuda$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|errors?)")
PART: Final = "TEST_PART"  # 2/8: every eighth test, from the third
_MOST_AT_ONCE: Final = 14  # each has a context and tensors on the device
# Into how many parts a module's tests are divided: those that take longest or show most. They begin first.
_PARTS: Final = {
    "test_fused_sampling.py": 1,
    "test_fused_attention.py": 10,
    "test_gpu.py": 3,
    "test_fused_products.py": 12,
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This module is the plugin of pytest that keeps every count-th test, after marks have deselected others."""
    index, count = map(int, os.environ[PART].split("/"))
    items[:] = items[index::count]


def files_with_mark() -> list[str]:
    """Test modules that have a test marked cuda, those first that take longest or show most."""
    found = sorted(
        (REPOSITORY / "tests").rglob("test_*.py"),
        key=lambda path: (list(_PARTS).index(path.name) if path.name in _PARTS else len(_PARTS), path),
    )
    return [str(path.relative_to(REPOSITORY)) for path in found if _MARK.search(path.read_text())]


def run(record: Recorder, settings: Settings) -> str:
    """A module that needs a library which is not here is named, and stops no other. Returns those that did not run."""
    parts = {
        file if count == 1 else f"{file}, part {index + 1} of {count}": (file, index, count)
        for file in files_with_mark()
        for count in [_PARTS.get(Path(file).name, 1)]
        for index in range(count)
    }
    with ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, (os.cpu_count() or 1) - 2))) as threads:
        running = {threads.submit(_results, *part): name for name, part in parts.items() if not record.has(name)}
        for ended in as_completed(running):
            record.put(running[ended], ended.result())
    bad = [file for file, counts in record.figures.items() if counts.get("failed") or counts.get("error")]
    if bad:
        raise AssertionError(f"tests fail: {', '.join(bad)}")
    lacking = [f"{file} lacks {counts['lacks']}" for file, counts in record.figures.items() if "lacks" in counts]
    return f"not run: {', '.join(lacking)}" if lacking else ""


def _results(file: str, index: int, count: int) -> dict[str, int | str]:
    """How the tests of a module ended: every count-th one, from the index."""
    command = [sys.executable, "-m", "pytest", "-c", str(CONFIGURATION), "--rootdir", ".", "--noconftest", "-m", "cuda"]
    # Installed plugins take most of the start of a process, and no test marked cuda needs one.
    environment = os.environ | {PART: f"{index}/{count}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command += ["-p", __name__, file]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode == 2 and (lacks := _LACKS.search(done.stdout)):
        return {"lacks": lacks[1]}
    last = _last_line(done.stdout)
    counts: dict[str, int | str] = {name.removesuffix("s"): int(count) for count, name in _COUNT.findall(last)}
    if done.returncode not in (0, 5):  # 5: no test was selected
        print((done.stdout + done.stderr)[-6000:], flush=True)
        if not counts.get("failed"):
            counts |= {"error": 1, "reason": _last_line(done.stdout + done.stderr)[:200]}
    return counts


def _last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or [""])[-1]
