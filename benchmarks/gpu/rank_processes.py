"""The ranks of a group as processes on this machine, one for each GPU, without Ray."""

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

_POLL_S: Final = 0.2
_LEAVE_S: Final = 20.0  # for ranks that have said all to leave their group


class RankProcesses:
    """`benchmarks.gpu.rank`, once for each rank. A context: its end ends the processes."""

    def __init__(self, task: str, num_ranks: int, settings: Settings, words: Sequence[str] = ()) -> None:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="llama-gpu-ranks-"))
        base = [sys.executable, "-m", "benchmarks.gpu.rank", task]
        commands = [
            [*base, str(rank), str(num_ranks), folder, *words, *settings.arguments] for rank in range(num_ranks)
        ]
        self.processes = [
            subprocess.Popen(command, cwd=REPOSITORY, stdout=None if rank else subprocess.PIPE, text=True)
            for rank, command in enumerate(commands)
        ]
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._stack.close()

    def figures(self) -> Iterator[tuple[str, Any]]:
        """What rank 0 reports, by name, until the ranks have ended. Raises RuntimeError if one fails."""
        while True:
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
                if failed:
                    raise RuntimeError(
                        f"rank {failed[0]} ended with status {self.processes[failed[0]].returncode}"
                    ) from None
                continue
            if line is None:
                break
            if line.startswith("{"):
                yield from json.loads(line).items()
        self._await_end()

    def _await_end(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        for rank, process in enumerate(self.processes):
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"rank {rank} did not leave its group within {_LEAVE_S:g} s") from None
            if status:
                raise RuntimeError(f"rank {rank} ended with status {status}")

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            self._lines.put(line)
        self._lines.put(None)


def measure_in_ranks(record: Recorder, settings: Settings, task: str, num_ranks: int) -> None:
    """Store what the ranks report as soon as they do. They leave out what is stored."""
    have = [word for name in record.figures for word in ("--have", name)]
    with RankProcesses(task, num_ranks, settings, have) as ranks:
        for name, value in ranks.figures():
            record.put(name, value)


def group_sizes(settings: Settings) -> list[int]:
    """2, and the largest power of two for which there are GPUs."""
    import torch

    num_gpus = torch.cuda.device_count() if settings.device == "cuda" else 2
    return sorted({2, 1 << (max(2, num_gpus).bit_length() - 1)})
