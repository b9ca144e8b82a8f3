"""Sends one step to every rank and gathers the answers; notices a rank that is gone, fails or falls silent. Knows no
Ray.

Steps are answered in the order in which they were sent, by every rank. Rank 0's answer is the step's result and is
given out as it arrives; the others' acknowledgements only have to come within the deadline. The first certain sign of
trouble ends it all: a model split over ranks cannot go on with one of them missing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cluster.wire.messages import Answer, Fault, WireError, decode_reply, frame
from cluster.wire.transport import RankConnection
from llama_core.errors import RankFailure
from llama_core.scheduling.step import StepInput, StepOutput

logger = logging.getLogger(__name__)

# An operation between ranks through gloo or NCCL fails on the survivors a few milliseconds after a rank died, and their
# reports may overtake the sign of the death itself. So long is the better explanation waited for. (In shared memory the
# survivors just wait, and are ended.)
_SECOND_SIGN_S: Final = 0.2
# A step's deadline, once so many have shown what these ranks need: many times the longest one, and for each token some times
# what one by itself took at most (which is far more than it costs among others). Never below what a busy machine may cost.
_ENOUGH_STEPS: Final = 32
_TIMES_LONGEST: Final = 20.0
_TIMES_A_TOKEN: Final = 4.0
_SHORTEST_DEADLINE_S: Final = 10.0
_LOOK_EVERY_S: Final = 1.0
_LATE_S: Final = 1.0  # a timer that comes so late says that this process stood still itself


class _UnansweredStep:
    """A step that was sent, that runs `num_tokens`, draws `num_draws`, and that `num_missing` ranks have not answered."""

    __slots__ = ("num_draws", "num_missing", "num_tokens", "result", "step")

    def __init__(self, batch: StepInput, num_missing: int, result: asyncio.Future[StepOutput]) -> None:
        self.step = batch.step
        self.num_tokens = batch.num_tokens
        self.num_draws = batch.num_draws
        self.num_missing = num_missing
        self.result = result


class FanOut:
    """Over one connection a rank, in their order. `on_failure` is called once; `on_overdue` with the ranks that have
    not answered a step, and how many seconds after its turn: `step_timeout_s` at most, less once it is known what steps
    take. It must lead to `suspect` or `fail`.
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
        self._flights: deque[_UnansweredStep] = deque()
        self._num_completed = 0  # steps that every rank has answered
        self._num_answered = [0] * len(connections)
        self._oldest_since = 0.0  # when the oldest flight became the oldest, in the loop's time
        self._longest_s = self._longest_of_a_token_s = 0.0
        self._look_at = 0.0  # when the watch is due
        self._watch: asyncio.TimerHandle | None = None
        self._verdict: asyncio.TimerHandle | None = None
        self._signs: dict[int, str] = {}
        self._raised: set[int] = set()  # ranks that reported an exception of their own
        for rank, connection in enumerate(self._connections):
            connection.attend(partial(self._on_payload, rank), partial(self._on_closed, rank))

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        """Sends a step; steps run in the order of these calls. Raises RankFailure, or WireError if it is too long to
        send.
        """
        assert batch.epoch == self._epoch, f"a step of epoch {batch.epoch} in epoch {self._epoch}"
        if self.failure is not None:
            raise self.failure.again()
        data = frame(batch)
        result: asyncio.Future[StepOutput] = self._loop.create_future()
        if not self._flights:
            self._oldest_since = self._loop.time()
        self._flights.append(_UnansweredStep(batch, len(self._connections), result))
        for connection in self._connections:
            connection.write(data)
        if self._watch is None:
            self._look_in(self._deadline_s())
        return result

    def suspect(self, rank: int, cause: str, *, certain: bool = True) -> None:
        """`rank` shows a sign of failure. A certain one decides at once; another may still turn out to be the effect
        of one.
        """
        if self.failure is not None or rank in self._signs:
            return
        self._signs[rank] = cause
        if certain:
            self._decide(rank)
        elif self._verdict is None:
            self._verdict = self._loop.call_later(_SECOND_SIGN_S, self._decide, rank)

    def fail(self, failure: RankFailure) -> None:
        """Ends every step in flight with `failure`, each once, and closes the connections. The first call counts."""
        if self.failure is not None:
            return
        self.failure = failure
        for timer in (self._watch, self._verdict):
            if timer is not None:
                timer.cancel()
        for connection in self._connections:
            connection.close()
        flights, self._flights = self._flights, deque()
        for flight in flights:
            if not flight.result.done():
                flight.result.set_exception(failure.again())
        self._on_failure(failure)

    def _decide(self, rank: int) -> None:
        self.fail(RankFailure(f"rank {rank} {self._signs[rank]}", rank=rank, raised=rank in self._raised))

    def _on_closed(self, rank: int, reason: str) -> None:
        self.suspect(rank, f"died: {reason}")

    def _on_payload(self, rank: int, payload: bytes) -> None:
        try:
            reply = decode_reply(payload)
        except WireError as error:
            self.suspect(rank, f"sent what is no answer: {error}")
            return
        if isinstance(reply, Fault):
            if not reply.collective:
                self._raised.add(rank)
            self.suspect(rank, f"failed: {reply.kind}: {reply.message}", certain=not reply.collective)
            return
        if isinstance(reply, Answer):
            epoch, step, is_due = reply.output.epoch, reply.output.step, rank == 0
        else:
            epoch, step, is_due = reply.epoch, reply.step, rank == reply.rank != 0
        index = self._num_answered[rank] - self._num_completed
        if not is_due or epoch != self._epoch or index >= len(self._flights) or self._flights[index].step != step:
            due = f"step {self._flights[index].step}" if index < len(self._flights) else "nothing"
            self.suspect(
                rank,
                f"answered epoch {epoch}, step {step} ({type(reply).__name__}), "
                f"where {due} of epoch {self._epoch} was due",
            )
            return
        flight = self._flights[index]
        if isinstance(reply, Answer) and len(reply.output.tokens) != flight.num_draws:
            num_tokens = len(reply.output.tokens)
            self.suspect(rank, f"answered step {step} with {num_tokens} tokens, where {flight.num_draws} were due")
            return
        self._num_answered[rank] += 1
        flight.num_missing -= 1
        if isinstance(reply, Answer) and not flight.result.done():
            flight.result.set_result(reply.output)
        while self._flights and not self._flights[0].num_missing:
            completed = self._flights.popleft()
            self._num_completed += 1
            now = self._loop.time()
            took_s, self._oldest_since = now - self._oldest_since, now
            if self._stands_still(now):
                continue
            self._longest_s = max(self._longest_s, took_s)
            self._longest_of_a_token_s = max(self._longest_of_a_token_s, took_s / max(1, completed.num_tokens))

    def _deadline_s(self) -> float:
        """How long the oldest step may take."""
        if self._num_completed < _ENOUGH_STEPS:
            return self._step_timeout_s
        of_tokens_s = _TIMES_A_TOKEN * self._longest_of_a_token_s * self._flights[0].num_tokens
        learned_s = max(_SHORTEST_DEADLINE_S, _TIMES_LONGEST * self._longest_s, of_tokens_s)
        return min(learned_s, self._step_timeout_s)

    def _stands_still(self, now: float) -> bool:
        """Whether this process itself did nothing for a while, and what took so long was not the ranks."""
        return now - self._look_at > _LATE_S

    def _look_in(self, seconds: float) -> None:
        seconds = min(seconds, _LOOK_EVERY_S)  # what is allowed changes from step to step
        self._look_at = self._loop.time() + seconds
        self._watch = self._loop.call_later(seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        """One timer for all steps: it looks at the oldest, and sleeps for what that one has left."""
        self._watch = None
        if not self._flights:
            return
        now = self._loop.time()
        if self._stands_still(now):
            self._oldest_since = now
        deadline_s = self._deadline_s()
        left_s = self._oldest_since + deadline_s - now
        if left_s > 0:
            self._look_in(left_s)
            return
        silent = [rank for rank, answered in enumerate(self._num_answered) if answered == self._num_completed]
        logger.error("step=%d overdue ranks=%s", self._flights[0].step, silent)
        self._on_overdue(silent, deadline_s)
