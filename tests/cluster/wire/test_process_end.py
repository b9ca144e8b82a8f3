"""A process counts as gone only when no thread of it is left. Real processes, no Ray."""

import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.wire.process_end import ProcessIdentity, end_process, is_running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

EXIT_SYSCALL = {"x86_64": 60, "aarch64": 93}.get(platform.machine(), 1)
# The main thread ends by the system call that ends one thread; another thread and the process's memory live on.
MAIN_THREAD_EXITS = f"""
import ctypes, threading, time
memory = bytearray(50_000_000)
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall({EXIT_SYSCALL}, 0)
"""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    yield started
    started.kill()
    started.wait()


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2][0]


def wait_for_zombie(pid: int) -> None:
    wait_until(f"process {pid} is a zombie", lambda: state_of(pid) == "Z", pause_s=0.005)


@pytest.mark.parametrize("child", [MAIN_THREAD_EXITS], indirect=True)
def test_a_process_without_its_main_thread_runs_while_another_thread_lives(child: subprocess.Popen[str]) -> None:
    identity = ProcessIdentity.of(child.pid)
    wait_for_zombie(child.pid)
    assert is_running(identity)
    assert end_process(identity, patience_s=0.1, timeout_s=120)
    assert not is_running(identity)
    assert child.wait(120) == -9, "it took the signal"


@pytest.mark.parametrize("child", ["print('ready', flush=True)"], indirect=True)
def test_a_zombie_without_threads_counts_as_gone(child: subprocess.Popen[str]) -> None:
    identity = ProcessIdentity.of(child.pid)
    wait_for_zombie(child.pid)
    assert not is_running(identity)
    assert end_process(identity, patience_s=0.0, timeout_s=0.0)


@pytest.mark.parametrize("child", ["print('ready', flush=True); import time; time.sleep(600)"], indirect=True)
def test_another_process_with_the_same_pid_is_not_mistaken_for_it(child: subprocess.Popen[str]) -> None:
    identity = ProcessIdentity.of(child.pid)
    assert is_running(identity)
    assert not is_running(ProcessIdentity(child.pid, identity.started + 1))
