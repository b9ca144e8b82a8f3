"""Decides when drafts are worth a step's time, and counts how many are accepted. Knows nothing of models or steps.

What drafts gain is learned for each sequence (`drafting.py`). What they cost is learned from the time of steps, where a replica
measures it (`step_costs.py`): drafts lengthen the step for every running and waiting sequence. Without measurements every
decision depends on tokens alone, because ranks that schedule for themselves (torchrun) must decide alike.
"""

from typing import Final

from llama_core.scheduling.drafting import MAX_DRAFTS_PER_ROW, PRICE_ALONE, PRICE_BESIDE_OTHERS, Drafting, DraftPrice
from llama_core.scheduling.step_costs import StepCosts

# With measurements: drafts must gain more than they cost by this factor, because both are estimates.
_SAFETY: Final = 1.25


class Speculation:
    """The drafts of all sequences: how many a step may have, and how many were checked and accepted so far."""

    def __init__(self, max_drafts: int, max_step_tokens: int, stop_ids: frozenset[int]) -> None:
        """max_drafts: of one step, 0 for no speculation."""
        self.num_drafts = self.num_accepted = 0  # that steps have checked, and sampled
        self.costs: StepCosts | None = None
        self._max_drafts = max_drafts
        self._max_step_tokens = max_step_tokens
        self._stop_ids = stop_ids

    def max_drafts_per_row(self, num_running: int) -> int:
        """The most drafts of one row: the running sequences share a step's drafts. 0 where each would have fewer than 2."""
        if not num_running:
            return 0
        num_drafts = min(self._max_drafts, self._max_step_tokens - num_running) // num_running
        return min(num_drafts, MAX_DRAFTS_PER_ROW) if num_drafts > 1 else 0

    def price(self, num_running: int, num_waiting: int) -> DraftPrice:
        """The price of a draft in a step of `num_running` sequences, while `num_waiting` others wait. All of them lose its
        time."""
        alone = num_running == 1
        if self.costs is None or not (decode_ms := self.costs.decode_ms(num_running)):
            return PRICE_ALONE if alone else PRICE_BESIDE_OTHERS
        draft_ms = self.costs.draft_ms(num_running) or 0.0
        once = (self.costs.gap_ms or 0.0) / decode_ms if alone else 1.0
        return DraftPrice(_SAFETY * (num_running + num_waiting) * draft_ms / decode_ms, _SAFETY * once)

    def propose(
        self, drafting: Drafting, tokens: list[int], limit: int, price: DraftPrice, *, ignore_eos: bool
    ) -> list[int]:
        """Up to `limit` drafts, none of them a stop id; [] when checking them would not pay."""
        count = drafting.num_worthwhile(limit, price)
        drafts = drafting.drafter.propose(tokens, count) if count else []
        if not ignore_eos:
            for at, token in enumerate(drafts):
                if token in self._stop_ids:
                    return drafts[:at]
        return drafts

    def verify(self, drafting: Drafting, tokens: list[int], proposed: list[int] | None, sampled: list[int]) -> int:
        """How many of the proposed tokens were sampled. Where none was proposed, learn from the draft that could have been."""
        drafts = proposed or drafting.drafter.propose(tokens, 1)
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == sampled[num_accepted]:
            num_accepted += 1
        drafting.observe(num_accepted, num_accepted < len(drafts))
        if proposed is None:
            return 0
        self.num_drafts += len(proposed)
        self.num_accepted += num_accepted
        return num_accepted
