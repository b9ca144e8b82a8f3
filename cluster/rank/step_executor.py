"""Answers the driver's steps with the outputs of the rank's runner. Knows no Ray and no torch."""

import time
from collections import deque
from typing import Final

from cluster.wire.collective_errors import is_collective
from cluster.wire.messages import Ack, Answer, Fault, FrameSocket, WireError, decode_step
from cluster.wire.rank_runner import RankRunner
from llama_core.model.share import SAMPLING_RANK
from llama_core.scheduling.step import Pending, StepOutput

_MAX_QUEUED_STEPS: Final = 1  # on a device, after the step that it computes
_POLL_S: Final = 50e-6  # the interval of checks whether the device's step is ready, while no message has arrived
_MAX_MESSAGE_CHARS: Final = 2000


class StepExecutor:
    """One rank's loop over one connection to the driver. `num_steps` and `step_s` (seconds) count what it has computed."""

    def __init__(self, rank: int, epoch: int, driver: FrameSocket, runner: RankRunner) -> None:
        self.num_steps = 0
        self.step_s = 0.0
        self._ended = 0.0  # when the latest result was read
        self._rank = rank
        self._epoch = epoch
        self._driver = driver
        self._runner = runner

    def run(self) -> None:
        """Answer steps in order, each as soon as it is ready, until the driver closes the connection.

        A step that arrives while a device still computes is queued after that one. Raises WireError, OSError and whatever
        the runner raises.
        """
        in_flight: deque[tuple[float, Pending[StepOutput]]] = deque()  # when each was started
        driver = self._driver
        while True:
            while in_flight and (len(in_flight) > _MAX_QUEUED_STEPS or in_flight[0][1].is_ready()):
                self._answer(self._result_of(*in_flight.popleft()))
            if in_flight and not driver.is_waiting(_POLL_S):
                continue
            payload = driver.receive()
            if payload is None:
                return
            batch = decode_step(payload)
            if batch.epoch != self._epoch:
                raise WireError(f"got a step of epoch {batch.epoch} in epoch {self._epoch}")
            in_flight.append((time.perf_counter(), self._runner.start(batch)))

    def report(self, error: BaseException) -> None:
        """Send the driver the reason for which this rank ends. Raises OSError, WireError."""
        text = str(error)[:_MAX_MESSAGE_CHARS]
        self._driver.send(Fault(self._epoch, self._rank, type(error).__name__, text, is_collective(error)))

    def _result_of(self, began: float, step: Pending[StepOutput]) -> StepOutput:
        """Waits for the step. Its time begins when the one before it has ended, if it was queued earlier."""
        output = step.result()
        ended = time.perf_counter()
        self.step_s += ended - max(began, self._ended)
        self._ended = ended
        return output

    def _answer(self, output: StepOutput) -> None:
        self.num_steps += 1
        if self._rank == SAMPLING_RANK:
            self._driver.send(Answer(output))
        else:
            self._driver.send(Ack(output.epoch, output.step, self._rank))
