"""Chooses the bundles of the next attempt to start ranks, after a failure or when there is room for more. Pure: makes no
call and never waits.

The bundles in which ranks served come first. If ranks cannot start in those, the plan takes all remaining bundles: a model can
be split over any number of ranks up to its number of query heads, and no plan has more ranks than were configured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

# Failures in a row of one bundle, and no other, that mark it as faulty: a GPU may be gone.
SAME_BUNDLE_ATTEMPTS: Final = 3


@dataclass
class RecoveryPlan:
    """One recovery. Bundles are Ray's indices in the placement group.

    all_bundles: of as many ranks as are configured. bundles: those in which ranks served until now. is_growth: the old ranks
    are replaced by more ranks and did not fail. For `patience_s` the plan accepts no fewer ranks than configured, later any
    number from `min_ranks` up.
    """

    all_bundles: list[int]
    bundles: list[int]
    is_growth: bool
    patience_s: float
    min_ranks: int
    began: float = field(default_factory=lambda: time.monotonic())
    too_few: str | None = None  # why fewer ranks than `min_ranks`, raised since, cannot serve
    failed_bundles: list[int | None] = field(default_factory=list)  # of each failed attempt; None if it named no rank

    @property
    def is_first_growth(self) -> bool:
        """Whether the next attempt is the first of a growth. Later attempts use the former bundles."""
        return self.is_growth and not self.failed_bundles

    @property
    def wanted(self) -> list[int]:
        """All bundles for the first attempt to grow; otherwise those in which ranks served."""
        return self.all_bundles if self.is_first_growth else self.bundles

    def choose(self, usable: Sequence[int]) -> list[int]:
        """The bundles to try next, out of the `usable` ones; empty while waiting is better."""
        if time.monotonic() - self.began < self.patience_s:
            return self._most_of(usable, len(self.all_bundles))
        without = [bundle for bundle in usable if bundle != self.faulty_bundle]
        # If too few bundles are left without the faulty one, the plan keeps trying it: the fault may pass.
        return self._most_of(without, self.min_ranks) or self._most_of(usable, self.min_ranks)

    @property
    def faulty_bundle(self) -> int | None:
        """The bundle that the latest attempts all failed in, if there is one."""
        latest = set(self.failed_bundles[-SAME_BUNDLE_ATTEMPTS:])
        return latest.pop() if len(self.failed_bundles) >= SAME_BUNDLE_ATTEMPTS and len(latest) == 1 else None

    def _most_of(self, usable: Sequence[int], min_ranks: int) -> list[int]:
        for bundles in (self.wanted, self.bundles):
            if set(bundles) <= set(usable):
                return bundles
        return list(usable) if len(usable) >= min_ranks else []
