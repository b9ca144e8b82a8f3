"""The seconds that a rank counts as spent in steps, in virtual time."""

import socket
from types import SimpleNamespace

import pytest

from cluster.rank import step_executor
from cluster.rank.step_executor import StepExecutor
from cluster.wire.messages import FrameSocket, frame
from llama_core.scheduling.step import Pending, Row, StepInput, StepOutput


class Script:
    """Step n arrives at arrivals[n] and is computed at ends[n]: by the host in `start`, or by a device behind it."""

    def __init__(self, arrivals: list[float], ends: list[float], is_host: bool) -> None:
        self.now = 0.0
        self.num_started = 0
        self.arrivals, self._ends, self._is_host = arrivals, ends, is_host

    def perf_counter(self) -> float:
        return self.now

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        number = self.num_started
        self.num_started += 1

        def result() -> StepOutput:
            self.now = self._ends[number]
            return StepOutput(batch.epoch, batch.step, [7])

        return Pending.done(result()) if self._is_host else Pending(result, lambda: self._is_over(number))

    def _is_over(self, number: int) -> bool:
        """Whether the step ends before the next one arrives."""
        later = self.arrivals[self.num_started :]
        return not later or self._ends[number] <= later[0]


class Driver(FrameSocket):
    """Steps arrive by the script."""

    def __init__(self, connection: socket.socket, script: Script) -> None:
        super().__init__(connection)
        self._script = script

    def receive(self) -> bytes | None:
        received = super().receive()
        if received is not None:
            self._script.now = max(self._script.now, self._script.arrivals[self._script.num_started])
        return received


@pytest.mark.parametrize(
    ("is_host", "arrivals", "ends", "seconds"),
    [
        (False, [0.0, 1.0], [10.0, 15.0], 15.0),  # the second is queued behind the first
        (False, [0.0, 1.0, 2.0], [10.0, 15.0, 31.0], 31.0),
        (False, [0.0, 100.0], [10.0, 103.0], 13.0),  # nothing to do for 90 s
        (True, [0.0, 1.0], [4.0, 9.0], 9.0),
        (True, [0.0, 50.0], [4.0, 59.0], 13.0),
    ],
)
def test_a_step_takes_the_time_from_its_start_or_from_the_end_of_the_one_before_it(
    is_host: bool, arrivals: list[float], ends: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(arrivals, ends, is_host)
    monkeypatch.setattr(step_executor, "time", SimpleNamespace(perf_counter=script.perf_counter))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for number in range(len(ends)):
            ours.sendall(frame(StepInput(0, number, [Row(0, number, 1, True)])))
        ours.shutdown(socket.SHUT_WR)
        executor = StepExecutor(0, 0, Driver(theirs, script), script)
        executor.run()
    assert (executor.num_steps, executor.step_s) == (len(ends), seconds)
