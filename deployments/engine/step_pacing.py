"""Decides when the next step is made, and how many prompt tokens it may have, from the times of earlier steps.

A step that is made while another runs lets the ranks continue without a wait, but a request that arrives after that waits for
both. So the next step is made late: shortly before the running one is expected to end.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from llama_core.scheduling.scheduler import TOKENS_A_PROMPT, TOKENS_ALONE, Scheduler
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.scheduling.step_costs import StepCosts, StepShape

# How long a step with prompts may take: new requests wait for it, and so do the running ones.
LONGEST_STEP_S: Final = 3.0
# How long before the expected end of the running step the next one is made: for scheduling, sending and a late timer, and a
# share of the running step's time, which is an estimate.
LEAD_S: Final = 0.003
LEAD_SHARE: Final = 0.15
SHORTEST_HOLD_S: Final = 0.001  # a shorter one saves less than its timer costs
_STEADY_S: Final = 0.01  # ranks that waited longer than this for a step were idle


class SentStep(NamedTuple):
    """A step in flight. sent_s: by time.monotonic."""

    batch: StepInput
    output: asyncio.Future[StepOutput]
    shape: StepShape
    sent_s: float
    is_queued: bool  # sent while another step was in flight


class StepPacing:
    """Learns from every completed step of a scheduler, whose limits and costs it sets."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.costs = StepCosts()
        self._scheduler = scheduler
        self._completed_s = 0.0  # the newest completed step
        scheduler.use_costs(self.costs)
        scheduler.limit_prompt_tokens(TOKENS_ALONE)  # until the first steps show how fast the ranks are

    def due_s(self, in_flight: Sequence[SentStep], now_s: float) -> float | None:
        """When the next step should be made, by time.monotonic; None for at once: no request could gain by a wait."""
        if not in_flight or not self._scheduler.admits_newcomers:
            return None
        expected_ms = 0.0
        for step in in_flight:
            if (step_ms := self.costs.step_ms(step.shape)) is None:
                return None
            expected_ms += step_ms
        began_s = max(in_flight[0].sent_s, self._completed_s)
        due_s = began_s + expected_ms / 1e3 * (1 - LEAD_SHARE) - LEAD_S
        return due_s if due_s - now_s >= SHORTEST_HOLD_S else None

    def completed(self, step: SentStep, output: StepOutput, now_s: float) -> None:
        """Learn from the output of a step, the oldest in flight."""
        self.costs.observe(step.shape, output.elapsed_ms)
        if not step.is_queued and step.sent_s - self._completed_s < _STEADY_S:
            self.costs.observe_gap((now_s - step.sent_s) * 1e3 - output.elapsed_ms)
        self._completed_s = now_s
        self._limit_prompt_tokens(step.shape, step.batch.num_tokens, output.elapsed_ms)

    def _limit_prompt_tokens(self, shape: StepShape, num_tokens: int, elapsed_ms: float) -> None:
        """Learn from a step with prompts how many prompt tokens fit into the longest time that a step may take."""
        if shape.num_prompt_tokens >= TOKENS_A_PROMPT and elapsed_ms > 0:
            fitting = int(num_tokens / elapsed_ms * 1e3 * LONGEST_STEP_S)
            self._scheduler.limit_prompt_tokens(max(TOKENS_A_PROMPT, fitting))
