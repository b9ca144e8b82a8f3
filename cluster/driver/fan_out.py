"""Sends each step to every rank and gathers the answers; detects a rank that dies, fails or stops answering. Knows no Ray.

Every rank answers steps in the order in which they were sent. Rank 0's answer is the step's result and is passed on when it
arrives; the other ranks' acknowledgements only have to arrive within the deadline. The first certain sign of a failure ends
the group: a model that is split over ranks cannot run without one of them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cluster.wire.messages import Ack, Answer, Fault, WireError, decode_reply, frame
from cluster.wire.transport import RankConnection
from llama_core.errors import RankFailure
from llama_core.model.share import SAMPLING_RANK
from llama_core.scheduling.step import StepInput, StepOutput

logger = logging.getLogger(__name__)

# When a rank dies, a collective operation through gloo or NCCL fails on the other ranks a few milliseconds later. Their reports
# may overtake the sign of the death. The fan-out waits this long for that sign, which names the cause. (With collectives in
# shared memory the other ranks report nothing: they wait until they are ended.)
_SECOND_SIGN_S: Final = 0.2
# A step's deadline is learned after this many steps. It is the larger of two: a multiple of the longest step so far, and for
# each token of the step a multiple of the longest time per token, which steps of few tokens have. A busy machine needs the
# minimum.
_ENOUGH_STEPS: Final = 32
_TIMES_LONGEST: Final = 20.0
_TIMES_A_TOKEN: Final = 4.0
_SHORTEST_DEADLINE_S: Final = 10.0
_CHECK_PERIOD_S: Final = 1.0
_LATE_S: Final = 1.0  # a timer this late shows that this process itself stood still


@dataclass(slots=True, eq=False)
class _UnansweredStep:
    """A step in flight that `num_missing` ranks have not answered."""

    batch: StepInput
    num_missing: int
    result: asyncio.Future[StepOutput]


class FanOut:
    """Sends steps over one connection for each rank, in the order of the ranks.

    on_failure: called once. on_overdue: called with the ranks that have not answered a step by its deadline, and the deadline
    in seconds: `step_timeout_s` at most, less once the fan-out has learned how long steps take. `on_overdue` must lead to a
    call of `note_failure_sign` or `fail`.
    """

    def __init__(
        self,
        connections: Sequence[RankConnection],
        *,
        epoch: int,
        step_timeout_s: float,
        on_failure: Callable[[RankFailure], None],
        on_overdue: Callable[[list[int], float], None],
    ) -> None:
        self.failure: RankFailure | None = None
        self._connections = list(connections)
        self._epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._on_failure = on_failure
        self._on_overdue = on_overdue
        self._loop = asyncio.get_running_loop()
        self._in_flight: deque[_UnansweredStep] = deque()
        self._num_completed = 0  # steps that every rank has answered
        self._num_answered = [0] * len(connections)
        self._oldest_since = 0.0  # when the oldest step in flight became the oldest, in the loop's time
        self._longest_s = self._longest_of_a_token_s = 0.0
        self._check_due = 0.0  # in the loop's time
        self._check: asyncio.TimerHandle | None = None
        self._decision: asyncio.TimerHandle | None = None
        self._signs: dict[int, str] = {}  # of failures, by rank
        self._raised: set[int] = set()  # ranks that reported an exception that is no collective error
        for rank, connection in enumerate(self._connections):
            connection.attend(partial(self._on_payload, rank), partial(self._on_closed, rank))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        """Send a step; steps run in the order of these calls. Raises RankFailure, or WireError if it is too long to send."""
        assert batch.epoch == self._epoch, f"a step of epoch {batch.epoch} in epoch {self._epoch}"
        if self.failure is not None:
            raise self.failure.again()
        data = frame(batch)
        result: asyncio.Future[StepOutput] = self._loop.create_future()
        if not self._in_flight:
            self._oldest_since = self._loop.time()
        self._in_flight.append(_UnansweredStep(batch, len(self._connections), result))
        for connection in self._connections:
            connection.write(data)
        if self._check is None:
            self._check_in(self._deadline_s())
        return result

    def note_failure_sign(self, rank: int, cause: str, *, certain: bool = True) -> None:
        """Note a sign of failure of `rank`. A certain sign ends the group at once; an uncertain one may be the effect of
        another rank's failure, whose sign is still to arrive.
        """
        if self.failure is not None or rank in self._signs:
            return
        self._signs[rank] = cause
        if certain:
            self._decide(rank)
        elif self._decision is None:
            self._decision = self._loop.call_later(_SECOND_SIGN_S, self._decide, rank)

    def fail(self, failure: RankFailure) -> None:
        """End every step in flight with `failure`, each once, and close the connections. Only the first call counts."""
        if self.failure is not None:
            return
        self.failure = failure
        for timer in (self._check, self._decision):
            if timer is not None:
                timer.cancel()
        for connection in self._connections:
            connection.close()
        in_flight, self._in_flight = self._in_flight, deque()
        for step in in_flight:
            if not step.result.done():
                step.result.set_exception(failure.again())
        self._on_failure(failure)

    def _decide(self, rank: int) -> None:
        self.fail(RankFailure(f"rank {rank} {self._signs[rank]}", rank=rank, raised=rank in self._raised))

    def _on_closed(self, rank: int, reason: str) -> None:
        self.note_failure_sign(rank, f"died: {reason}")

    def _on_payload(self, rank: int, payload: bytes) -> None:
        try:
            reply = decode_reply(payload)
        except WireError as error:
            self.note_failure_sign(rank, f"sent an invalid answer: {error}")
            return
        if isinstance(reply, Fault):
            if not reply.collective:
                self._raised.add(rank)
            self.note_failure_sign(rank, f"failed: {reply.kind}: {reply.message}", certain=not reply.collective)
            return
        if problem := self._problem_with(rank, reply):
            self.note_failure_sign(rank, problem)
            return
        answered = self._in_flight[self._num_answered[rank] - self._num_completed]
        self._num_answered[rank] += 1
        answered.num_missing -= 1
        if isinstance(reply, Answer) and not answered.result.done():
            answered.result.set_result(reply.output)
        while self._in_flight and not self._in_flight[0].num_missing:
            self._complete(self._in_flight.popleft())

    def _problem_with(self, rank: int, reply: Answer | Ack) -> str:
        """Why this is not the rank's answer to the step that is due from it; "" if it is that answer."""
        if isinstance(reply, Answer):
            epoch, step, is_due = reply.output.epoch, reply.output.step, rank == SAMPLING_RANK
        else:
            epoch, step, is_due = reply.epoch, reply.step, rank == reply.rank != SAMPLING_RANK
        index = self._num_answered[rank] - self._num_completed
        due = self._in_flight[index] if index < len(self._in_flight) else None
        if not is_due or epoch != self._epoch or due is None or due.batch.step != step:
            expected = "nothing" if due is None else f"step {due.batch.step}"
            return (
                f"answered epoch {epoch}, step {step} ({type(reply).__name__}), "
                f"where {expected} of epoch {self._epoch} was due"
            )
        if isinstance(reply, Answer) and (found := len(reply.output.tokens)) != (wanted := due.batch.num_samples):
            return f"answered step {step} with {found} tokens, where {wanted} were due"
        return ""

    def _complete(self, step: _UnansweredStep) -> None:
        """Every rank has answered the oldest step: learn how long it took."""
        self._num_completed += 1
        now = self._loop.time()
        took_s, self._oldest_since = now - self._oldest_since, now
        if self._stood_still(now):
            return
        self._longest_s = max(self._longest_s, took_s)
        self._longest_of_a_token_s = max(self._longest_of_a_token_s, took_s / max(1, step.batch.num_tokens))

    def _deadline_s(self) -> float:
        """The time that the oldest step may take."""
        if self._num_completed < _ENOUGH_STEPS:
            return self._step_timeout_s
        of_tokens_s = _TIMES_A_TOKEN * self._longest_of_a_token_s * self._in_flight[0].batch.num_tokens
        learned_s = max(_SHORTEST_DEADLINE_S, _TIMES_LONGEST * self._longest_s, of_tokens_s)
        return min(learned_s, self._step_timeout_s)

    def _stood_still(self, now: float) -> bool:
        """Whether this process itself has not run for a while, so that a long step says nothing about the ranks."""
        return now - self._check_due > _LATE_S

    def _check_in(self, seconds: float) -> None:
        seconds = min(seconds, _CHECK_PERIOD_S)  # the deadline changes from step to step
        self._check_due = self._loop.time() + seconds
        self._check = self._loop.call_later(seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        """Check the oldest step, and set the one timer of all steps to the time that this step has left."""
        self._check = None
        if not self._in_flight:
            return
        now = self._loop.time()
        if self._stood_still(now):
            self._oldest_since = now
        deadline_s = self._deadline_s()
        left_s = self._oldest_since + deadline_s - now
        if left_s > 0:
            self._check_in(left_s)
            return
        silent = [rank for rank, answered in enumerate(self._num_answered) if answered == self._num_completed]
        logger.error("step=%d overdue ranks=%s", self._in_flight[0].batch.step, silent)
        self._on_overdue(silent, deadline_s)
