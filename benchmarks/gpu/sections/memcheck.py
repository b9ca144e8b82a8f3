"""Runs every Triton kernel once under compute-sanitizer's memcheck."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

import torch

from benchmarks.gpu.every_kernel import CAPTURES, kernels_in_source, parts
from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

_PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
_ERROR_STATUS = 86
_MOST_AT_ONCE: Final = 14  # processes, each with a CUDA context on the device


def command() -> list[str]:
    """The command line that runs a program under compute-sanitizer. Raises Unavailable if that is not installed."""
    found = shutil.which("compute-sanitizer") or next((path for path in _PLACES if os.access(path, os.X_OK)), None)
    if found is None:
        raise Unavailable("compute-sanitizer is not installed")
    return [found, "--tool", "memcheck", "--error-exitcode", str(_ERROR_STATUS)]


def run(record: Recorder, settings: Settings) -> None:
    """Run the parts of `every_kernel` concurrently, because they spend most of their time compiling on the host.

    Records the kernels of each part, and last the number of all kernels. Raises AssertionError if a part fails or a kernel is
    not launched.
    """
    # On a CPU the kernels run in Triton's interpreter, without compute-sanitizer: no invalid address is found there.
    words = [] if settings.device == "cpu" else command()
    names = [name for name in parts(torch.device(settings.device)) if not record.has(name)]
    with ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, (os.cpu_count() or 1) - 2))) as threads:
        running = {threads.submit(_kernels, words, settings.device, name): name for name in names}
        failed = []
        for ended in as_completed(running):
            try:
                record.put(running[ended], ended.result())
            except AssertionError as error:
                failed.append(str(error))
    if failed:
        raise AssertionError("; ".join(failed))
    kernels = {kernel for found in record.figures.values() if isinstance(found, list) for kernel in found}
    if missing := kernels_in_source() - kernels:
        raise AssertionError(f"not launched: {', '.join(sorted(missing))}")
    record.put("kernels", len(kernels))
    record.put("errors", 0)


def _kernels(words: list[str], device: str, part: str) -> list[str]:
    """Run a part and return the names of its kernels. Raises AssertionError with memcheck's report."""
    environment = dict(os.environ)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    elif part != CAPTURES:
        # Without torch's caching allocator, each tensor is an allocation whose end memcheck knows. Graphs need that allocator.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    program = [sys.executable, "-m", "benchmarks.gpu.every_kernel", device, part]
    done = subprocess.run([*words, *program], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        raise AssertionError(f"{part}: status {done.returncode}: {(done.stderr or done.stdout)[-400:]}")
    return [line.removeprefix("kernel ") for line in done.stdout.splitlines() if line.startswith("kernel ")]
