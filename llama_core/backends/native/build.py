"""Compiles the C++ of this folder for the CPU it runs on, once, and keeps the library in the user's cache directory.

The library's name is a hash of the sources, the compiler, its flags and the CPU's features: a change of any makes a new one.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from llama_core.errors import ConfigError
from llama_core.host.cache_dir import cache_dir

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=fast")
_TIMEOUT_S = 300.0


class Unavailable(Exception):
    """The native engine cannot be used here; the text says why."""


@cache
def library_path() -> Path:
    """The compiled engine, built if there is none yet. Raises Unavailable.

    LLAMA_CXX names the compiler (else CXX, c++, g++, clang++), LLAMA_CXXFLAGS adds flags, LLAMA_CACHE_DIR names the
    directory of the library.
    """
    if sys.platform != "linux":
        raise Unavailable(f"it needs Linux, this is {sys.platform}")
    compiler = _compiler()
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *_FLAGS, tune, *os.environ.get("LLAMA_CXXFLAGS", "").split()]
    try:
        directory = cache_dir()
    except ConfigError as error:
        raise Unavailable(error.message) from None
    library = directory / f"llama-{_fingerprint(command)}.so"
    try:
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one machine start together, and one of them builds
            if not library.exists():
                _compile(command, library)
    except OSError as error:
        raise Unavailable(f"it cannot be kept in {directory}: {error}") from None
    return library


def _compile(command: list[str], library: Path) -> None:
    begin = time.perf_counter()
    unfinished = library.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(
            [*command, str(_SOURCES / "engine.cpp"), "-o", str(unfinished)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[:500]}")
        unfinished.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} failed: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    log.info("native engine built in %.1f s: %s", time.perf_counter() - begin, library)


def _compiler() -> str:
    named = os.environ.get("LLAMA_CXX") or os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        if found := shutil.which(candidate):
            return found
    raise Unavailable(f"there is no C++ compiler ({named or 'c++, g++ or clang++'})")


def _fingerprint(command: list[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    for source in sorted(_SOURCES.rglob("*.[ch]pp")):
        digest.update(str(source.relative_to(_SOURCES)).encode() + source.read_bytes())
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        digest.update(subprocess.run([command[0], "--version"], capture_output=True, timeout=30, check=False).stdout)
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        digest.update("\n".join(line for line in cpu if line.startswith(("flags", "Features", "model name"))).encode())
    return digest.hexdigest()[:16]
