"""All choices of one request as one stream with one end.

A failure of one choice ends all of them, and `cancel` frees every choice's cache blocks. Knows nothing of the answer's format.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.openai.answers.answer import AnswerEnding
from deployments.openai.plan import Plan
from llama_core.errors import LlamaError, RequestCancelled
from llama_core.scheduling.request import FinishReason


async def submitted(
    engine: Engine, plan: Plan, suspended: Sequence[SequenceStream] = (), *, is_timed: bool = False, numerics: str = ""
) -> "Choices":
    """Submits every choice, or none: raises what `Engine.submit` raises. suspended: the choices, which go on instead. is_timed:
    for a trace. numerics: as `Engine.submit` has it."""
    if not suspended:
        return Choices(await engine.submit(plan.request, is_timed=is_timed, numerics=numerics), plan)
    await engine.readmit(suspended, is_timed=is_timed)
    return Choices(suspended, plan)


class Choices:
    """Reads every choice of a plan: `wait`, then `take` until it returns None, until `num_open` is 0; then `cancel`.

    Choices with a delta are taken in the order in which their deltas arrived, so that none starves another. Deltas that the
    reader has not taken stay in the engine, which joins them into larger ones.
    """

    def __init__(self, streams: Sequence[SequenceStream], plan: Plan) -> None:
        """streams: of all choices of the plan's request, in their order."""
        self.streams = streams
        self.num_open = plan.request.num_choices
        self._endings = [AnswerEnding(plan.answer_ending) for _ in self.streams] if plan.answer_ending else []
        self._loop = asyncio.get_running_loop()
        self.ready: deque[int] = deque()  # choices of which `take` may find a delta
        self._waiter: asyncio.Future[bool] | None = None
        self._waiting_since_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        n = plan.request.n
        # By choice, the choices that reuse its prompt logprobs; they are read after its first delta.
        firsts = range(0, self.num_open if plan.shares_prompt_logprobs else 0, n)
        self._followers = {first: range(first + 1, first + n) for first in firsts}
        self.listen()

    def listen(self) -> None:
        """Have `take` find the choices that have a delta. To be called again after `take_to`."""
        self.ready.clear()
        following = set().union(*self._followers.values())
        for index in range(len(self.streams)):
            if index not in following:
                self._listen(index)

    def take(self) -> tuple[int, Delta] | None:
        """The next (choice, delta) that has arrived, or None. Raises the error that ended a choice."""
        while self.ready:
            index = self.ready.popleft()
            if (delta := self._taken(index)) is not None:
                return index, delta
        return None

    async def take_to(self, index: int, until: int, timeout_s: float) -> Delta | None:
        """Waits for the delta of this choice that ends there, as `SequenceStream.take` has it; None after `timeout_s`, as with
        `wait`."""
        while (delta := self._taken(index, until)) is None:
            self.ready.clear()
            self._listen(index)
            if not await self.wait(timeout_s):
                return None
        return delta

    def _taken(self, index: int, until: int | None = None) -> Delta | None:
        delta = self.streams[index].take(until)
        if delta is None:
            return None
        for follower in self._followers.pop(index, ()):
            self._listen(follower)
        if delta.finish_reason is not None:
            if delta.finish_reason is FinishReason.ABORT:
                raise RequestCancelled("the server stopped this request")
            self.num_open -= 1
        return self._endings[index].without(delta, self.streams[index]) if self._endings else delta

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for a delta; False after `timeout_s`, which must be the same at every call."""
        if self.ready:
            return True
        self._waiter = self._loop.create_future()
        if timeout_s is not None:
            self._waiting_since_s = self._loop.time()
            if self._alarm is None:
                self._alarm = self._loop.call_later(timeout_s, self._on_alarm, timeout_s)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def end(self, error: LlamaError) -> None:
        """Ends every choice that has not ended, with this error."""
        for stream in self.streams:
            stream.end(error)

    def cancel(self) -> None:
        """Ends every choice and forgets it. Idempotent; never waits, so it also works in a cancelled task."""
        if self._alarm is not None:
            self._alarm.cancel()
        for stream in self.streams:
            stream.cancel()
        self.streams = ()  # each refers to this object, and a reference cycle would wait for the garbage collector

    def suspend(self) -> Sequence[SequenceStream]:
        """`cancel`, but the choices keep their tokens. Returns them for other `Choices`."""
        streams, self.streams = self.streams, ()
        for stream in streams:
            stream.suspend()
        self.cancel()
        return streams

    def _listen(self, index: int) -> None:
        self.streams[index].listen(partial(self._on_ready, index))

    def _on_ready(self, index: int) -> None:
        self.ready.append(index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _on_alarm(self, timeout_s: float) -> None:
        """One timer serves all waits, because every token has a wait: it is set again to the remaining time."""
        self._alarm = None
        if self._waiter is None or self._waiter.done():
            return  # the next wait sets the timer again
        left_s = self._waiting_since_s + timeout_s - self._loop.time()
        if left_s > 0.001:  # the loop's clock counts milliseconds
            self._alarm = self._loop.call_later(left_s, self._on_alarm, timeout_s)
        else:
            self._waiter.set_result(False)
