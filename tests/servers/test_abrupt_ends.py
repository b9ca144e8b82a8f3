"""`llama-ray up` or a process of its Ray is killed: nothing that the command started goes on running or listening."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.server import Server, served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


def pids(server: Server, program: str) -> list[int]:
    return [pid for pid, command in server.processes().items() if program in command.split(" ")[0]]


def kill(program: str) -> Callable[[Server], None]:
    def kill_it(server: Server) -> None:
        (pid,) = pids(server, program)
        os.kill(pid, signal.SIGKILL)

    return kill_it


def kill_the_command(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGKILL)


def signal_at_once(server: Server) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(server.process.pid, number)


def test_a_command_that_is_killed_while_it_starts_leaves_nothing() -> None:
    with served() as server:
        for name in ("ray::RuntimeEnvAgent", "ray::ServeController"):
            wait_until(f"{name} starts", lambda name=name: name in "".join(server.processes().values()))  # type: ignore[misc]
        kill_the_command(server)
        assert server.wait_gone() == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param(kill_the_command, -signal.SIGKILL, id="the command is killed"),
        pytest.param(kill("/raylet"), 1, id="the raylet is killed"),
        pytest.param(kill("/gcs_server"), 1, id="the control service is killed"),
        pytest.param(signal_at_once, 0, id="two signals at once"),
    ],
)
def test_an_abrupt_end_on_a_busy_machine_leaves_nothing(end: Callable[[Server], None], status: int) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with served() as server:
            server.wait_ready()
            assert any("haproxy" in command for command in server.listening().values())
            end(server)
            assert server.process.wait(120) == status
            assert server.wait_gone() == {} == server.listening()
            if status == 1:
                assert "Ray has ended" in server.output()
    finally:
        for process in busy:
            process.kill()
            process.wait()
