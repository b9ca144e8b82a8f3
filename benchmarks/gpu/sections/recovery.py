"""A process that replays decodes is killed: when its memory is free, and when the process after it gives a token.

The next process waits with its libraries imported and no CUDA context, as a standby does. It begins when the killed one is
gone, and knows how many blocks its cache had, as in the server. Its time is counted beyond a load that nothing disturbs.
"""

import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.random_checkpoint import random_checkpoint
from benchmarks.gpu.recorder import Recorder, waited
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

_LIMIT_S = 60.0


def run(record: Recorder, settings: Settings) -> None:
    if record.has("kill_to_token_s"):
        return
    with random_checkpoint(settings) as folder:
        clock = clock_of(settings.device)
        clock.synchronize()
        idle = clock.free_bytes()
        processes = first, victim, heir = [_Process(settings, folder) for _ in range(3)]
        try:
            record.put("first_load_s", first.start()["load_s"])
            before = clock.free_bytes()
            first.process.kill()
            _wait_until_free(clock, first, idle, before)
            # Undisturbed, and from the page cache, as after a failure.
            undisturbed = victim.start()
            record.put("load_s", undisturbed["load_s"])
            record.put("start", undisturbed["split"])
            before = clock.free_bytes()
            begin = time.perf_counter()
            victim.process.kill()
            victim.process.wait()
            heir.go(undisturbed["blocks"])  # it waits for the memory itself, as new ranks do
            gone_s = time.perf_counter() - begin
            took = heir.read() | heir.read()
            record.put("kill_to_token_s", time.perf_counter() - begin)
            record.put("process_gone_s", gone_s)
            record.put("next_load_s", took["load_s"])
            record.put("next_start", took["split"])
            record.put("next_ready_s", took["ready_s"])
            record.put("beyond_load_s", record.figures["kill_to_token_s"] - undisturbed["load_s"])
            heir.process.kill()
            record.put("memory_free_after_s", _wait_until_free(clock, heir, idle, before))
        finally:
            for process in processes:
                process.end()


def _wait_until_free(clock: Clock, process: "_Process", idle: int, before: int) -> float | str:
    found = waited(lambda: _is_free(clock, process, idle, before), _LIMIT_S)
    return found if found is not None else f"not within {_LIMIT_S:g} s"


def _is_free(clock: Clock, process: "_Process", idle: int, before: int) -> bool:
    """The memory that the process held is free, but for a hundredth. On a CPU: the process is gone."""
    gone = process.process.poll() is not None
    return gone and (clock.device.type == "cpu" or clock.free_bytes() >= idle - 0.01 * (idle - before))


class _Process:
    """`benchmarks.gpu.replaying`, which begins when it is told to."""

    def __init__(self, settings: Settings, folder: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.replaying", folder, *settings.arguments]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()  # it has its libraries

    def go(self, former_blocks: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{former_blocks}\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("the process ended before it said anything")

    def start(self) -> dict[str, Any]:
        """Until its first token; from there on it replays."""
        self.go()
        return self.read() | self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
