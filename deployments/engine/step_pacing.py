"""Decides when the next step is made, and how many prompt tokens it may have, from the times of earlier steps.

A step that is made while another runs lets the ranks continue without a wait, but a request that arrives after that waits for
both. So the next step is made late: shortly before the running one is expected to end.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from llama_core.scheduling.prompt_budget import TOKENS_ALONE
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.scheduling.step_costs import StepCosts, StepShape

# How long a step with prompts may take: new requests wait for it, and so do the running ones.
LONGEST_STEP_S: Final = 3.0
# How long the chunk of a prompt may delay the tokens of the running requests, on ranks that compute more than the scheduler's
# least chunk in that time, such as GPUs.
CHUNK_S: Final = 0.05
LEAST_PROMPT_TOKENS: Final = 128  # of a step on the slowest ranks; steps with fewer say little about the ranks' speed
# After the last other request, for the next one of its client: a background step in between would delay that.
HOLD_BACKGROUND_S: Final = 0.05
# How long before the expected end of the running step the next one is made: a constant for scheduling, sending and a late
# timer, and a share of the running step's expected time, which is an estimate. A learned factor multiplies both.
LEAD_S: Final = 0.002
LEAD_SHARE: Final = 0.1
SMALLEST_FACTOR: Final = 0.5
LARGEST_FACTOR: Final = 4.0
# The factor settles where about one held step in 20 comes late: 1.25 ** 0.05 * 0.99 ** 0.95 is nearly 1.
_AFTER_LATE: Final = 1.25
_AFTER_EARLY: Final = 0.99
_LATE_S: Final = 0.0003  # sending takes this long: a step sent later than this before the previous output was late
SHORTEST_HOLD_S: Final = 0.001  # holding a step back for less saves less than its timer costs
_STEADY_S: Final = 0.01  # ranks that waited longer than this for a step were idle


class SentStep(NamedTuple):
    """A step in flight. sent_s: by time.monotonic."""

    batch: StepInput
    output: asyncio.Future[StepOutput]
    shape: StepShape
    sent_s: float
    is_queued: bool  # sent while another step was in flight


class HeldStep:
    """Calls `send` after `delay_s`, unless `end` is called before."""

    def __init__(self, send: Callable[[], object], delay_s: float) -> None:
        self.was_sent = False
        self._send = send
        self._error: Exception | None = None
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._send_now)

    def end(self) -> None:
        """Raises what `send` raised."""
        self._timer.cancel()
        if self._error is not None:
            raise self._error

    def _send_now(self) -> None:
        self.was_sent = True
        try:
            self._send()
        except Exception as error:
            self._error = error


class StepPacing:
    """Learns from every completed step of a scheduler, whose limits and costs it sets."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.costs = StepCosts()
        self._scheduler = scheduler
        self._completed_s = 0.0  # the newest completed step
        self._lead_factor = 1.0
        self._waited_for_masks = False  # the newest completed step
        self._others_end_s = -math.inf  # of the last request that was no background one; infinity while one is live
        scheduler.speculation.costs = self.costs  # by which it weighs drafts
        scheduler.prompt_budget.limit(TOKENS_ALONE)  # until the first steps show how fast the ranks are

    def due_s(self, in_flight: Sequence[SentStep], now_s: float) -> float | None:
        """When the next step should be made, by time.monotonic. None for at once: no step is in flight, a newcomer could not
        join the step, the time of those in flight is unknown, or the wait would be too short. A background step waits, also
        with none in flight, for requests of others' clients."""
        if not self._scheduler.is_background:
            self._others_end_s = math.inf if self._scheduler.has_work else -math.inf
        else:
            self._others_end_s = min(self._others_end_s, now_s)
            if (due_s := self._others_end_s + HOLD_BACKGROUND_S) > now_s:
                return due_s
        if not in_flight or not self._scheduler.admits_newcomers:
            return None
        expected_ms = 0.0
        for step in in_flight:
            if (step_ms := self.costs.step_ms(step.shape)) is None:
                return None
            expected_ms += step_ms
        began_s = max(in_flight[0].sent_s, self._completed_s)
        due_s = began_s + expected_ms / 1e3 - self.lead_s(expected_ms / 1e3)
        return due_s if due_s - now_s >= SHORTEST_HOLD_S else None

    def lead_s(self, expected_s: float) -> float:
        """How long before the expected end of a step that takes `expected_s` the next one is made."""
        return self._lead_factor * (LEAD_S + LEAD_SHARE * expected_s)

    def learn_lead(self, spare_s: float) -> None:
        """Learn from a held step. spare_s: seconds from sending it to the output of the step before; 0 if it was sent after
        that output. A step before that waited for masks teaches nothing, because its expected time leaves waits out."""
        if self._waited_for_masks:
            return
        factor = self._lead_factor * (_AFTER_LATE if spare_s < _LATE_S else _AFTER_EARLY)
        self._lead_factor = min(LARGEST_FACTOR, max(SMALLEST_FACTOR, factor))

    def completed(self, step: SentStep, output: StepOutput, now_s: float) -> None:
        """Learn from the output of a step, the oldest in flight."""
        mask_wait_ms = output.mask_wait_ms or 0.0
        own_ms = output.elapsed_ms - mask_wait_ms
        self._waited_for_masks = mask_wait_ms > 0 or bool(output.deferred)
        # Where a backend does not measure the wait, a step with deferred rows may have waited.
        is_measured = output.mask_wait_ms is not None or not output.deferred
        if step.batch.adapters:
            self.costs.observe_load(step.shape, own_ms)
        elif is_measured:
            self.costs.observe(step.shape, own_ms)
        if not step.is_queued and step.sent_s - self._completed_s < _STEADY_S:
            self.costs.observe_gap((now_s - self._completed_s) * 1e3 - output.elapsed_ms)
        self._completed_s = now_s
        if is_measured and step.shape.num_prompt_tokens >= LEAST_PROMPT_TOKENS and own_ms > 0:
            self._limit_prompt_tokens(step.shape, own_ms)

    def _limit_prompt_tokens(self, shape: StepShape, elapsed_ms: float) -> None:
        """Learn from a step with prompts how many prompt tokens fit into the times that a step and a chunk may take."""
        tokens_a_second = shape.num_tokens / elapsed_ms * 1e3
        self._scheduler.prompt_budget.limit(max(LEAST_PROMPT_TOKENS, int(tokens_a_second * LONGEST_STEP_S)))
        self._scheduler.prompt_budget.use_chunk(int(tokens_a_second * CHUNK_S))
