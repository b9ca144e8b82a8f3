"""When a waiting thread of the native engine yields its core (native/waiting.hpp), compiled here as a library of its own."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_core.execution.native import build

SHIM = """
#include "waiting.hpp"
extern "C" {
llama::CoreSharing* make() { return new llama::CoreSharing; }
void drop(llama::CoreSharing* core) { delete core; }
void observe(llama::CoreSharing* core, double before, double after) { core->observe(before, after); }
int is_paused(llama::CoreSharing* core, double now) { return core->is_paused(now); }
}
"""
SLICE_S = 0.003
SHORT_S = 0.0002


class Core:
    """One CoreSharing, with a clock that the test sets."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = ctypes.c_void_p(library.make())
        self.now = 10.0

    def yields(self, seconds: float) -> None:
        """The thread yields and gets its core back after `seconds`."""
        self.library.observe(self.handle, ctypes.c_double(self.now), ctypes.c_double(self.now + seconds))
        self.now += seconds

    def is_paused(self) -> bool:
        return bool(self.library.is_paused(self.handle, ctypes.c_double(self.now)))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = build._compiler()
    except build.Unavailable as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("core_sharing")
    source, target = directory / "shim.cpp", directory / "shim.so"
    source.write_text(SHIM)
    headers = Path(build.__file__).parent
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    loaded = ctypes.CDLL(str(target))
    loaded.make.restype = ctypes.c_void_p
    return loaded


@pytest.fixture
def core(library: ctypes.CDLL) -> Iterator[Core]:
    made = Core(library)
    yield made
    library.drop(made.handle)


def test_an_event_loop_that_takes_two_slices_a_step_does_not_pause_yielding(core: Core) -> None:
    for _ in range(200):
        core.yields(SLICE_S / 2)
        core.yields(SLICE_S)
        assert not core.is_paused()
        core.now += 0.015


def test_a_busy_neighbour_costs_less_than_a_twentieth_of_the_time_in_yields(core: Core) -> None:
    begin, yielding = core.now, 0.0
    while core.now < begin + 10.0:
        if core.is_paused():
            core.now += 0.001
        else:
            core.yields(SLICE_S)
            yielding += SLICE_S
    assert yielding < 0.05 * 10.0


def test_yielding_goes_on_at_once_when_the_neighbour_is_gone(core: Core) -> None:
    for _ in range(8):
        core.yields(SLICE_S)
    while core.is_paused():
        core.now += 0.01
    for _ in range(16):
        core.yields(SHORT_S)
    core.yields(SLICE_S)
    assert not core.is_paused(), "the earlier pause is forgotten"
