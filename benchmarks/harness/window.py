"""A part of a load's time, and what its streams were given in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.harness.load import Answer


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of time.perf_counter, half-open."""

    begin_s: float
    end_s: float

    def tokens_per_s(self, answers: Sequence[Answer]) -> float:
        """Tokens that reached clients in the window; an answer's tokens are spread evenly over its events."""
        total = 0.0
        for answer in answers:
            inside = sum(self.begin_s <= when < self.end_s for when in answer.token_times)
            total += inside * answer.num_tokens / max(1, len(answer.token_times))
        return total / (self.end_s - self.begin_s)

    def gaps_ms(self, answers: Sequence[Answer]) -> list[float]:
        """Milliseconds between two events of one answer, of those that end in the window."""
        return [
            1e3 * (after - before)
            for answer in answers
            for before, after in pairwise(answer.token_times)
            if self.begin_s <= after < self.end_s
        ]
