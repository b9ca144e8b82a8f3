"""One asyncio task per replica that asks the scheduler for steps, awaits the runner and feeds the streams.

The loop owns every token until the client, or its front, has it. Up to `pipeline_depth` steps are in flight at once, so
that the ranks find the next step waiting when they complete one (`step_pacing.py` says when it is made).
Knows nothing of HTTP, and of the ranks only that they take steps.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from copy import copy
from functools import partial

from deployments.engine.live_streams import LiveStreams, MeasuredStream, TokenSink
from deployments.engine.retry_after import RetryEstimate
from deployments.engine.step_pacing import HeldStep, SentStep, StepPacing
from deployments.engine.step_report import StepReports, StepStats
from deployments.engine.step_runner import StepRunner
from llama_core.errors import EngineError, InvalidParameter, NotReady, QueueFull, RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Request, Sequence, Terms, sequences_of
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.step_costs import CostModel, StepShape

log = logging.getLogger(__name__)


class EngineLoop:
    """Serves streams from one scheduler, over the runner that `run` is given."""

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        *,
        max_seq_len: int,
        pipeline_depth: int = 2,
        on_step: Callable[[StepStats], None] = lambda stats: None,
        on_end: Callable[[MeasuredStream], None] = lambda stream: None,
    ) -> None:
        """on_step, on_end: for metrics, of completed steps and of ended sequences."""
        self.scheduler = scheduler
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.elapsed_ms = 0.0  # of the latest step
        self.last_progress_s = time.monotonic()
        self.num_resumed = 0  # groups of ranks after the first
        self.num_steps = 0  # completed, but for those of the canary request alone
        self.num_requests = 0  # taken
        self._depth = pipeline_depth
        self._on_step = on_step
        self._retry = RetryEstimate()
        self._streams = LiveStreams(scheduler, self._retry, on_end)
        self._reports = StepReports(scheduler)
        self._wake = asyncio.Event()
        self.failure: EngineError | None = None  # why no request can be served any more
        self.is_draining = False
        self._pacing = StepPacing(scheduler)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def costs(self) -> CostModel:
        """Of this engine's steps, and the mean length of answers."""
        return self._pacing.costs.model(self._streams.output_tokens)

    def check_capacity(self, owner: str = "") -> None:
        """Raises QueueFull, with a time to retry, if not even one sequence of a token may be queued."""
        try:
            self.scheduler.check_capacity((1,), owner)
        except QueueFull as error:
            raise self._with_retry(error) from None

    def make_room(self, terms: Terms, lengths: Seq[int]) -> None:
        """Have a request whose sequences have so many tokens each find room, and end the streams that give way with QueueFull.
        None of their requests has begun. Raises QueueFull, with a time to retry, or InvalidParameter if no idle server could
        take the request."""
        try:
            victims = self.scheduler.make_room(lengths, terms.owner, is_background=terms.is_background)
        except QueueFull as error:
            raise self._with_retry(error) from None
        for seq in victims:
            stream = self._streams.drop(seq)
            assert stream is not None and isinstance(seq.error, QueueFull)
            stream.fail(self._with_retry(seq.error))

    def _with_retry(self, error: QueueFull) -> QueueFull:
        error.retry_after_s = self._retry.seconds(self.scheduler.num_waiting)
        return error

    def sequences_of(self, request: Request) -> list[Sequence]:
        """The sequences of a request that may be queued as a whole; `enter` queues them, and owners that wait take turns
        (`fair_queue.py`). Raises InvalidParameter, ContextLengthExceeded, QueueFull, NotReady or RankFailure."""
        self._check_takes_requests()
        self.check_adapter(request.terms.adapter)
        sequences = sequences_of(request, self.vocab_size, self.max_seq_len)
        self.make_room(request.terms, [seq.prompt_len for seq in sequences])
        self.num_requests += 1
        return sequences

    def check_adapter(self, adapter: str) -> None:
        """adapter: a digest; "" for none. Raises InvalidParameter for one that is not here."""
        if adapter and adapter not in self.scheduler.adapter_places.folders:
            raise InvalidParameter.of("model", "its adapter is not here any more")

    def continue_(self, sink: TokenSink, num_failures: int, *, first: bool) -> None:
        """Queue a sequence that another engine has begun. num_failures: engines that ended with it. first: before all others.
        Raises NotReady or RankFailure."""
        self._check_takes_requests()
        sink.sequence.progress.has_begun = True  # or another of its request has
        self.enter(sink, first=first)
        if not sink.sequence.finished:
            self.scheduler.quarantine.suspect(sink.sequence, num_failures)

    def cancel(self, seq: Sequence) -> None:
        """End a sequence that nobody reads any more."""
        self._streams.cancel(seq)

    def stop(self, seq: Sequence) -> None:
        """End a sequence whose text has reached a stop string."""
        if self._streams.get(seq) is not None:
            self.scheduler.stop(seq)
            self._streams.drop(seq)
            self._retry.request_ended(time.monotonic())

    def _check_takes_requests(self) -> None:
        if self.failure is not None:
            raise copy(self.failure)  # a raised error holds frames, here of every request that is refused
        if self.is_draining:
            raise NotReady("the server is shutting down and takes no new requests")

    def enter(self, stream: TokenSink, *, first: bool = False) -> None:
        self.scheduler.add(stream.sequence, first=first)
        was_idle = not self._streams
        if self._streams.add(stream):
            if was_idle:
                self.last_progress_s = time.monotonic()  # the time without work is no stall
            self._wake.set()

    async def run(self, runner: StepRunner) -> None:
        """Run steps until cancelled or until the runner raises; the streams stay as they are.

        After an error of the runner's the caller either ends the streams with `fail`, or continues every stream with `restart`,
        then `run` with the runner of other ranks.
        """
        in_flight: deque[SentStep] = deque()
        self.last_progress_s = time.monotonic()
        try:
            while True:
                due_s = self._send(runner, in_flight)
                if not in_flight and due_s is not None:
                    self._wake.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), due_s - time.monotonic())
                    continue
                if not in_flight:
                    assert not self.scheduler.has_work, "work waits, and no step is in flight that could free blocks"
                    self._streams.idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    self.last_progress_s = time.monotonic()
                    continue
                held_step = None
                if due_s is not None:
                    held_step = HeldStep(partial(self._send, runner, in_flight, held=True), due_s - time.monotonic())
                try:
                    output = await in_flight[0].output
                finally:
                    if held_step is not None:
                        held_step.end()
                answered = in_flight.popleft()
                canary = self.scheduler.quarantine.canary
                self.num_steps += canary is None or any(row.slot != canary.slot for row in answered.batch.rows)
                gained = self.scheduler.commit(output)
                self.last_progress_s, self.elapsed_ms = time.monotonic(), output.elapsed_ms
                self._pacing.completed(answered, output, self.last_progress_s)
                if held_step is not None and (in_flight or not held_step.was_sent):
                    self._pacing.learn_lead(self.last_progress_s - in_flight[-1].sent_s if in_flight else 0.0)
                # The ranks get their next step, unless it is held back, before the readers get the last one's tokens. So a stop
                # string is noticed a step late, which wastes a row. The tokens are delivered even if sending fails.
                try:
                    self._send(runner, in_flight)
                finally:
                    intervals = self._streams.deliver(gained, self.last_progress_s, output.elapsed_ms)
                self._on_step(self._reports.of(answered, output, gained, intervals))
        finally:
            for step in in_flight:
                step.output.cancel()
            await asyncio.gather(*(step.output for step in in_flight), return_exceptions=True)

    def resumed(self, num_blocks: int) -> None:
        """New ranks serve, with room for this many cache blocks. The time of their start is no stall."""
        self.num_resumed += 1
        old = self.scheduler.pool
        if num_blocks != old.num_blocks:
            log.info("the new ranks have room for %d cache blocks instead of %d", num_blocks, old.num_blocks)
            self.scheduler.use_pool(BlockPool(num_blocks, old.block_size))
        self._pacing = StepPacing(self.scheduler)  # other ranks may be faster or slower
        self.last_progress_s = time.monotonic()

    def restart(self, epoch: int, failure: RankFailure | None) -> bool:
        """Prepare the live requests for new ranks: `run` may then continue with their runner. No request loses a token. One
        that the failure proves harmful ends with PoisonRequest; returns whether one did.

        failure: of the old ranks; None where they were replaced without a failure.
        """
        harmful = self.scheduler.restart(epoch, failure)
        if harmful is None:
            return False
        assert isinstance(harmful.error, EngineError)
        if (stream := self._streams.drop(harmful)) is not None:
            stream.fail(harmful.error)
        return True

    def fail(self, error: EngineError) -> None:
        """End every live request with `error`, once, and refuse new ones with it."""
        self.failure = self.failure or error
        self._streams.fail(error)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until the live ones have ended. False if some have not within `timeout_s`."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._streams.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def stalled_s(self) -> float:
        """Seconds since a step completed while work waited; 0 when idle."""
        return time.monotonic() - self.last_progress_s if self._streams else 0.0

    def _send(self, runner: StepRunner, in_flight: deque[SentStep], *, held: bool = False) -> float | None:
        """Make and send steps until `pipeline_depth` are in flight, or nothing can run.

        A step may be held back for requests that can still join it: then returns when it is due, by time.monotonic, else None.
        held: the next step was held back, and is due now."""
        while len(in_flight) < self._depth:
            if not held and (due_s := self._pacing.due_s(in_flight, time.monotonic())) is not None:
                return due_s
            if (batch := self.scheduler.schedule()) is None:
                return None
            held, sent_s = False, time.monotonic()
            if batch.admit:
                self._note_admissions(len(batch.admit), sent_s)
            try:
                output = runner.submit(batch)
            except RankFailure:
                self.scheduler.drop_unsent()  # so that no request in it counts as harmful
                raise
            in_flight.append(SentStep(batch, output, StepShape.of(batch), sent_s, bool(in_flight)))
        return None

    def _note_admissions(self, count: int, now_s: float) -> None:
        """Note that the step just made admits `count` sequences. Some of them may have run before a preemption."""
        for seq in self.scheduler.newest(count):
            stream = self._streams.get(seq)
            if stream is not None and stream.timeline.admitted_s is None:
                stream.admitted(now_s)
                self._reports.admitted(seq)
