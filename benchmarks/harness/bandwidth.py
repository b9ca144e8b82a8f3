"""The speed at which this machine's memory can be read: the limit of decoding, which reads every weight for every token.

On a shared machine it may change from one second to the next, so it is measured immediately before and after the run that is
compared with it. The kernel, bandwidth.cpp, is compiled for this processor on first use.
"""

import ctypes
import hashlib
import os
import statistics
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import TracebackType

from benchmarks.harness.common import cache_sizes

_SOURCE = Path(__file__).with_name("bandwidth.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")
_CALIBRATION_PASSES = 2
# The limit is the fastest way to read, which depends on the processor. It is found once for each number of threads and size
# of buffer, not for each probe.
_FASTEST: dict[tuple[int, int], int] = {}


class NoCompiler(Exception):
    """g++ is missing or cannot compile the kernel, so the bandwidth cannot be measured."""


@cache
def _library() -> ctypes.CDLL:
    """The kernel, compiled once for each processor and each version of the source. Raises NoCompiler."""
    known = _SOURCE.read_bytes() + _processor().encode() + " ".join(_FLAGS).encode()
    name = f"llama-bench-bandwidth-{os.getuid()}-{hashlib.sha256(known).hexdigest()[:16]}.so"
    target = Path(tempfile.gettempdir()) / name
    if not target.exists() or target.stat().st_uid != os.getuid():
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="llama-bench-") as directory:
            built = Path(directory) / "kernel.so"
            try:
                command = ["g++", *_FLAGS, "-o", str(built), str(_SOURCE)]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            except FileNotFoundError:
                raise NoCompiler("the memory's bandwidth is measured by a kernel that needs g++") from None
            except subprocess.CalledProcessError as error:
                raise NoCompiler(f"g++ does not take {_SOURCE.name}: {error.stderr[-500:]}") from None
            built.replace(target)  # atomic, because another process may build it now
    library = ctypes.CDLL(str(target))
    library.make_buffer.argtypes = [ctypes.c_size_t]
    library.make_buffer.restype = ctypes.c_void_p
    library.free_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.free_buffer.restype = None
    pointer_int, pointer_double = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_double)
    library.read_passes.restype = ctypes.c_uint64
    library.read_passes.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, pointer_int, ctypes.c_int, ctypes.c_int, pointer_double)
    ]
    return library


class BandwidthProbe:
    """A kept buffer and the threads that read it. Use as a context, or `close` it.

    buffer_bytes: four times the largest cache and at least 512 MiB if not given. Raises NoCompiler, MemoryError.
    """

    def __init__(self, threads: int | None = None, buffer_bytes: int | None = None) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self.threads = min(threads or len(self._cores), len(self._cores))
        self.buffer_bytes = buffer_bytes or beyond_caches()
        self._library = _library()
        self._memory: int | None = self._library.make_buffer(self.buffer_bytes)
        if not self._memory:
            raise MemoryError(f"no {self.buffer_bytes} bytes for the bandwidth's buffer")
        place = self.threads, self.buffer_bytes
        if place not in _FASTEST:
            patterns = range(self._library.num_patterns())
            _FASTEST[place] = min(patterns, key=lambda pattern: min(self._passes(pattern, _CALIBRATION_PASSES)))
        self._pattern = _FASTEST[place]

    def gb_s(self, passes: int = 8) -> float:
        """10^9 bytes a second, the median of `passes` over the whole buffer."""
        return statistics.median(self.buffer_bytes / seconds / 1e9 for seconds in self._passes(self._pattern, passes))

    def close(self) -> None:
        if self._memory:
            self._library.free_buffer(self._memory, self.buffer_bytes)
        self._memory = None

    def __enter__(self) -> "BandwidthProbe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _passes(self, pattern: int, passes: int) -> list[float]:
        """Seconds of each pass. A first pass starts the threads and fills the caches; it is not counted."""
        assert self._memory, "closed"
        seconds = (ctypes.c_double * (passes + 1))()
        cores = (ctypes.c_int * self.threads)(*self._cores[: self.threads])
        self._library.read_passes(self._memory, self.buffer_bytes, self.threads, cores, pattern, passes + 1, seconds)
        return list(seconds)[1:]


def beyond_caches() -> int:
    """Bytes of a buffer so large that no cache holds much of it when the next pass begins."""
    return max(512 * 2**20, 4 * max(cache_sizes().values(), default=0))


def _processor() -> str:
    """The properties of the processor that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "".join(sorted({line for line in lines if line.startswith(("model", "flags", "cpu family"))}))
