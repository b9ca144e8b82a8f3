"""The watcher of `llama-ray up`: it ends what the command has started, however the command ends."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.wire.process_end import ProcessIdentity, end_process, is_running
from tests.support.programs import REPOSITORY, environment
from tests.support.waiting import wait_until

COMMAND = """
import os, subprocess, sys
from deployments.local import process_tag

stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"

def started():
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    return process.pid

tag, directory = sys.argv[1:]
others = started()
process_tag.start_watcher(tag, directory)
os.environ[process_tag.VARIABLE] = tag
print(others, started(), flush=True)
sys.stdin.read()
"""


def with_word(word: str) -> list[int]:
    """The ids of the processes that have this word in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize(
    ("send", "number"),
    [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGINT), (os.killpg, signal.SIGTERM)],
    ids=["killed", "Ctrl-C", "SIGTERM to the process group"],
)
def test_nothing_that_a_command_started_outlives_it(
    tmp_path: Path, send: Callable[[int, int], None], number: int
) -> None:
    """Processes that another command started, as on a cluster that is joined, do."""
    tag, directory = uuid.uuid4().hex, tmp_path / "files"
    directory.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, tag, str(directory)],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as command:
        assert command.stdout is not None
        others, own = (ProcessIdentity.of(int(pid)) for pid in command.stdout.readline().split())
        try:
            assert is_running(own) and len(with_word(tag)) == 2, "the command and its watcher"
            send(command.pid, number)
            wait_until("the command's process has ended", lambda: not is_running(own))
            wait_until("the command's files are gone", lambda: not directory.exists())
            wait_until("the watcher has ended too", lambda: not with_word(tag))
            assert is_running(others)
        finally:
            end_process(others, 0, 10)
            end_process(own, 0, 10)
