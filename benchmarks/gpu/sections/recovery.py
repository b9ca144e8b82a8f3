"""A process that replays decodes is killed: when its memory is free, and when the process after it gives a token.

The next process waits with its libraries imported and no CUDA context, as a standby does.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder, Unavailable, waited
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY
from benchmarks.harness.make_checkpoint import SHAPES, random_weights, write_meta

_LIMIT_S = 60.0


def run(record: Recorder, settings: Settings) -> None:
    if record.has("kill_to_token_s"):
        return
    model, dtype = model_of(settings), getattr(torch, settings.dtype)
    with tempfile.TemporaryDirectory(prefix="llama-gpu-bench-") as folder:
        need = 2 * model.n_layers * 12 * model.dim**2
        if shutil.disk_usage(folder).free < need:
            raise Unavailable(f"a checkpoint of {need / 1e9:.0f} GB does not fit into {folder}")
        write_meta(Path(folder), SHAPES[settings.shape], random_weights(model, dtype, seed=0), tokenizer=None)
        clock = clock_of(settings.device)
        clock.synchronize()
        idle = clock.free_bytes()
        victim, heir = (_Process(settings, folder) for _ in range(2))
        try:
            victim.go()
            record.put("load_s", victim.read()["load_s"])
            victim.read()  # its first token: from here on it replays
            before = clock.free_bytes()
            victim.process.send_signal(signal.SIGKILL)
            heir_begins = waited(lambda: _is_free(clock, victim, idle, before), _LIMIT_S)
            record.put("memory_free_after_s", heir_begins if heir_begins is not None else f"not within {_LIMIT_S:g} s")
            took = heir.go_and_wait()
            record.put("next_load_s", took["load_s"])
            record.put("next_graphs_and_first_steps_s", took["ready_s"])
            record.put("kill_to_token_s", (heir_begins or _LIMIT_S) + took["token_s"])
            record.put("beyond_load_s", record.figures["kill_to_token_s"] - took["load_s"])
        finally:
            victim.end()
            heir.end()


def _is_free(clock: Clock, victim: "_Process", idle: int, before: int) -> bool:
    """The memory that the process held is free, but for a hundredth. On a CPU: the process is gone."""
    gone = victim.process.poll() is not None
    return gone and (clock.device.type == "cpu" or clock.free_bytes() >= idle - 0.01 * (idle - before))


class _Process:
    """`benchmarks.gpu.replaying`, which begins when it is told to."""

    def __init__(self, settings: Settings, folder: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.replaying", folder, *settings.arguments]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()  # it has its libraries

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("the process ended before it said anything")

    def go_and_wait(self) -> dict[str, Any]:
        self.go()
        return self.read() | self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
