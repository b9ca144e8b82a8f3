"""In which seats ranks are tried next, after a failure or when there is room for more. Pure: asks nobody, waits for nothing.

A seat is a rank's place in the cluster. Those that served come first; where they do not come back, the most that are left and
over which the model can be split.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_core.config import ModelConfig
from llama_core.errors import ConfigError

ENOUGH_ATTEMPTS: Final = 3  # that one seat has failed, and no other: it may be its GPU


@dataclass
class Attempts:
    """To bring up ranks of `model`. all_seats: of all ranks that there should be; seats: those that served until then.

    is_growth: those gave way to more, and did not fail. For `patience_s` nothing less than they will do, later `least` ranks.
    """

    model: ModelConfig
    all_seats: list[int]
    seats: list[int]
    is_growth: bool
    patience_s: float
    least: int
    began: float = field(default_factory=time.monotonic)
    failed: list[int | None] = field(default_factory=list)  # which seat each attempt failed for, if that is known

    @property
    def wanted(self) -> list[int]:
        """All where it is to grow, once; those that served if that was no good, and after a failure."""
        return self.all_seats if self.is_growth and not self.failed else self.seats

    def choose(self, there: Sequence[int]) -> list[int]:
        """Of the seats that are `there`, those to try next; none while it is better to wait."""
        if time.monotonic() - self.began < self.patience_s:
            return self._most_of(there, len(self.all_seats))
        without = [seat for seat in there if seat != self.unlucky_seat]
        # Where nothing can be done without it, it is tried again and again: what it fails for may pass.
        return self._most_of(without, self.least) or self._most_of(there, self.least)

    @property
    def unlucky_seat(self) -> int | None:
        """That one attempt after the other failed for: a GPU may be gone while its node lives."""
        latest = set(self.failed[-ENOUGH_ATTEMPTS:])
        return latest.pop() if len(self.failed) >= ENOUGH_ATTEMPTS and len(latest) == 1 else None

    def _most_of(self, usable: Sequence[int], least: int) -> list[int]:
        for seats in (self.wanted, self.seats):
            if set(seats) <= set(usable):
                return seats
        return next((list(usable[:size]) for size in range(len(usable), least - 1, -1) if self._divides(size)), [])

    def _divides(self, num_ranks: int) -> bool:
        try:
            self.model.check_world_size(num_ranks)
        except ConfigError:
            return False
        return True
