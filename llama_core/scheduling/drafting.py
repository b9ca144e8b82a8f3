"""One sequence's drafter, and how many of its drafts are worth their price. Knows nothing of models or steps.

While no draft is sent, acceptance is learned from the draft that could have been proposed, which costs nothing.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from llama_core.scheduling.prompt_lookup import PromptLookup

MAX_DRAFTS_PER_ROW: Final = 7  # with the known token eight, a size that kernels handle well
_FIRST_ACCEPTANCE: Final = 0.25
_MEMORY: Final = 8  # drafts after which an old one counts about a third
_MIN_ACCEPTANCE: Final = 0.1


@dataclass(frozen=True, slots=True)
class DraftPrice:
    """What drafts of one sequence cost, in tokens that all sequences together would have gained meanwhile.

    each: the cost of every draft. once: the cost of having any, because the sequence waits for its output before its next row.
    """

    each: float
    once: float

    def pays_for_certain(self, count: int) -> bool:
        """Whether `count` drafts that are certain to be accepted gain more than they cost."""
        return count > 0 and count * (1.0 - self.each) >= self.once


# Without measurements. Seven drafts make a step of one row on a CPU up to a third longer, and while a sequence waits for its
# output, no step is in flight. Beside other running sequences, one that waits has a row in every second step only.
PRICE_ALONE: Final = DraftPrice(0.0, 0.5)
PRICE_BESIDE_OTHERS: Final = DraftPrice(0.0, 1.5)


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

    def num_worthwhile(self, limit: int, price: DraftPrice) -> int:
        """How many drafts, up to `limit`, a step should check; 0 where the sequence should not wait for its output.

        A draft counts only if every draft before it is accepted: the n-th with acceptance ** n.
        """
        reached, gain, count = self.acceptance, 0.0, 0
        while count < limit and reached > max(_MIN_ACCEPTANCE, price.each):
            gain += reached - price.each
            reached *= self.acceptance
            count += 1
        return count if gain >= price.once else 0


def new_drafting() -> Drafting:
    return Drafting(PromptLookup())
