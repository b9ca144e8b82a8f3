"""Every Triton kernel once, under compute-sanitizer's memcheck."""

import os
import shutil
import subprocess
import sys

from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

_PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
_ERROR_STATUS = 86


def command() -> list[str]:
    """compute-sanitizer before a program. Raises Unavailable where it is not installed."""
    found = shutil.which("compute-sanitizer") or next((path for path in _PLACES if os.access(path, os.X_OK)), None)
    if found is None:
        raise Unavailable("compute-sanitizer is not installed")
    return [found, "--tool", "memcheck", "--error-exitcode", str(_ERROR_STATUS)]


def run(record: Recorder, settings: Settings) -> None:
    # On a CPU the kernels run in Triton's interpreter, which finds no wrong address.
    is_cpu = settings.device == "cpu"
    words = [] if is_cpu else command()
    # Without torch's cache each tensor is an allocation, whose end memcheck knows.
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if is_cpu else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    program = [sys.executable, "-m", "benchmarks.gpu.every_kernel", settings.device]
    done = subprocess.run([*words, *program], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    print(done.stdout[-4000:], flush=True)
    if done.returncode:
        raise AssertionError(f"status {done.returncode}: {(done.stderr or done.stdout)[-400:]}")
    kernels = [line.removeprefix("kernel ") for line in done.stdout.splitlines() if line.startswith("kernel ")]
    record.put("kernels", kernels)
    record.put("errors", 0)
