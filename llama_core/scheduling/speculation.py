"""Decides when drafts are worth a step's time, and counts how many are accepted. Knows nothing of models or steps.

Whether drafts pay is learned for each sequence from the drafts that would have been accepted, which costs nothing while none is
sent. Every decision depends on tokens alone, never on time: ranks that schedule for themselves (torchrun) must decide alike.
"""

from typing import Final, Protocol

from llama_core.scheduling.prompt_lookup import PromptLookup

MAX_DRAFTS_PER_ROW: Final = 7  # with the known token eight, a size that kernels handle well
_FIRST_ACCEPTANCE: Final = 0.25
_MEMORY: Final = 8  # drafts after which an old one counts about a third
# Seven drafts make a step of one row on a CPU up to a third longer, and while a sequence waits for its output, no step is in
# flight. Beside other running sequences, one that waits has a row in every second step only.
_MIN_ACCEPTANCE: Final = 0.1
_MIN_GAIN_ALONE: Final = 0.5
_MIN_GAIN_BESIDE_OTHERS: Final = 1.5


class Drafter(Protocol):
    """Proposes tokens for one sequence, whose list of tokens only grows."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`."""


class Drafting:
    """One sequence's drafter, and `acceptance`: how likely its next draft is to be accepted."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.acceptance = _FIRST_ACCEPTANCE

    def observe(self, num_accepted: int, num_rejected: int) -> None:
        for _ in range(num_accepted):
            self.acceptance += (1.0 - self.acceptance) / _MEMORY
        for _ in range(num_rejected):
            self.acceptance -= self.acceptance / _MEMORY

    def num_worthwhile(self, limit: int, *, alone: bool) -> int:
        """How many drafts, up to `limit`, a step should check; 0 where the sequence should not wait for its output. `alone`: no
        other sequence runs.

        A draft counts only if every draft before it is accepted: the n-th with acceptance ** n.
        """
        reached, gain, count = self.acceptance, 0.0, 0
        while count < limit and reached > _MIN_ACCEPTANCE:
            gain += reached
            reached *= self.acceptance
            count += 1
        return count if gain >= (_MIN_GAIN_ALONE if alone else _MIN_GAIN_BESIDE_OTHERS) else 0


class Speculation:
    """The drafts of all sequences: how many a step may have, and how many were checked and accepted so far."""

    def __init__(self, max_drafts: int, max_step_tokens: int, stop_ids: frozenset[int]) -> None:
        """max_drafts: of one step, 0 for no speculation."""
        self.num_drafts = 0
        self.num_accepted = 0
        self._max_drafts = max_drafts
        self._max_step_tokens = max_step_tokens
        self._stop_ids = stop_ids

    def max_drafts_per_row(self, num_running: int) -> int:
        """The running sequences share the drafts of a step; 0 where there would be fewer than 2 for each."""
        if not num_running:
            return 0
        num_drafts = min(self._max_drafts, self._max_step_tokens - num_running) // num_running
        return min(num_drafts, MAX_DRAFTS_PER_ROW) if num_drafts > 1 else 0

    def propose(self, drafting: Drafting, tokens: list[int], limit: int, *, alone: bool, ignore_eos: bool) -> list[int]:
        """Up to `limit` drafts, none of them a stop id; [] when checking them would not pay."""
        count = drafting.num_worthwhile(limit, alone=alone)
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


def new_drafting() -> Drafting:
    return Drafting(PromptLookup())
