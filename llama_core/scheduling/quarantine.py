"""Decides whether a request makes the ranks fail, and which one, or whether the ranks themselves are at fault. Owns that state.

A failure of the ranks may be due to any request that had a row in a step in flight. Where it is computed again and the ranks
fail once more, the request is quarantined: it runs only beside requests that are trusted, so that the next failure shows
its cause. Each failure with one quarantined request in flight raises that request's failure score; at a score of 1 the
verdict is that this request harms the ranks, and it ends with `PoisonRequest`. New ranks first compute a canary request of two
sampled tokens: ranks that fail before the canary has ended are at fault themselves, and no score rises.

Knows nothing of Ray, of time or of the start of ranks.
"""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from llama_core.errors import PoisonRequest, RankFailure
from llama_core.log_lines import of_request
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams

log = logging.getLogger(__name__)

FAILURES_BEFORE_QUARANTINE: Final = 2
# A verdict needs two errors that a rank reports itself, or four deaths and hangs, which may have another cause.
SCORE_OF_AN_ERROR: Final = 0.5
SCORE_OF_A_DEATH: Final = 0.25
CANARY_TOKENS: Final = 2  # sampled: one by a prefill row and one by a decode row
MAX_FAILURES_WITHOUT_PROGRESS: Final = 12  # consecutive
MAX_VERDICTS_WITHOUT_PROGRESS: Final = 8  # consecutive: so many harmful requests are less likely than broken ranks
UNRELATED_AFTER_S: Final = 60.0  # a failure that long after a recovery does not count as consecutive


@dataclass(slots=True)
class _Record:
    """Failures of the ranks with this request in flight. At `safe_length` tokens the request is past the position that
    failed."""

    num_failures: int = 0
    score: float = 0.0
    safe_length: int = 0


class Quarantine:
    """The failures of each live request. `canary`: the latest canary request, which may have ended."""

    def __init__(self) -> None:
        self.canary: Sequence | None = None
        self._records: dict[Sequence, _Record] = {}
        self._quarantined: set[Sequence] = set()

    def num_failures(self, seq: Sequence) -> int:
        return self._records[seq].num_failures if seq in self._records else 0

    def admits(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        """Whether `seq` may run beside `running`: not if the next failure could be due to it or to one of them."""
        if not self._quarantined:
            return True
        if seq in self._quarantined:
            return all(other.is_trusted for other in running)
        return self._quarantined.isdisjoint(running)

    def tokens_sampled(self, seq: Sequence) -> None:
        """Note that the present ranks have sampled a token for `seq`, which is not trusted yet."""
        record = self._records.get(seq)
        if record is None or seq.length >= record.safe_length:
            self._forget(seq)
            seq.is_trusted = True

    def ended(self, seq: Sequence) -> None:
        if self._records:
            self._forget(seq)

    def ranks_replaced(self, live: Iterable[Sequence]) -> None:
        """Note that new ranks serve, which have sampled nothing yet."""
        for seq in live:
            seq.is_trusted = False

    def ranks_failed(self, in_flight: Iterable[Sequence]) -> None:
        """Count a failure against each request of the steps in flight. Call it before the scheduler resets them."""
        for seq in in_flight:
            record = self._records.setdefault(seq, _Record())
            record.num_failures += 1
            # `scheduled` is 0 once a sequence is preempted, so its known tokens count as well.
            reached = max(seq.scheduled + seq.num_drafts + 1, seq.length + seq.inflight)
            record.safe_length = max(record.safe_length, reached)
            if record.num_failures >= FAILURES_BEFORE_QUARANTINE:
                self._quarantined.add(seq)

    def suspect(self, seq: Sequence, num_failures: int) -> None:
        """Note failures of other engines with this sequence in flight."""
        if num_failures:
            self._records[seq] = _Record(num_failures, safe_length=seq.length + 1)
        if num_failures >= FAILURES_BEFORE_QUARANTINE:
            self._quarantined.add(seq)

    def verdict(self, in_flight: Iterable[Sequence], failure: RankFailure) -> Sequence | None:
        """The request that this failure proves harmful, with its `error` set; None if the failure proves nothing."""
        quarantined = [seq for seq in in_flight if seq in self._quarantined]
        if len(quarantined) != 1:
            return None
        (seq,) = quarantined
        record = self._records[seq]
        record.score += SCORE_OF_AN_ERROR if failure.raised else SCORE_OF_A_DEATH
        if record.score < 1.0:
            return None
        log.error(
            "quarantine verdict: a request of %d tokens made the ranks fail %d times and ends: %s",
            seq.length,
            record.num_failures,
            failure.message,
            extra=of_request(seq.terms.request_id),
        )
        seq.error = PoisonRequest(
            f"the model's processes failed {record.num_failures} times while they computed this request, which has ended"
        )
        return seq

    def new_canary(self, live: Iterable[Sequence], token: int) -> Sequence | None:
        """A canary request for new ranks, made of `token`, while a request is quarantined; else None."""
        self.canary = None
        if self._quarantined:
            prompt, params = [token] * 2, SamplingParams(temperature=0.0, ignore_eos=True)
            # With a quarantined request's owner, because a new owner would get a share of the queue.
            owner = next(seq.terms.owner for seq in live if seq in self._quarantined)
            self.canary = Sequence(prompt, params, max_length=len(prompt) + CANARY_TOKENS, terms=Terms(owner))
            # A failure on its record keeps quarantined requests from running beside the canary until it has ended.
            self._records[self.canary] = _Record(num_failures=1, safe_length=self.canary.max_length)
        return self.canary

    def _forget(self, seq: Sequence) -> None:
        self._records.pop(seq, None)
        self._quarantined.discard(seq)


class FailureStreak:
    """Counts consecutive failures of the ranks without progress between them, to decide whether to start ranks again."""

    def __init__(self) -> None:
        self._num_steps = 0  # completed when the ranks last failed
        self._num_failures = 0
        self._num_verdicts = 0

    def failed(self, num_steps: int, seconds_since_recovery: float) -> None:
        """Note a failure of the ranks after `num_steps` completed steps of the replica, canary steps not counted."""
        if num_steps > self._num_steps or seconds_since_recovery > UNRELATED_AFTER_S:
            self._num_failures = self._num_verdicts = 0
        else:
            self._num_failures += 1
        self._num_steps = num_steps

    def verdict_given(self) -> None:
        """Note that the quarantine has ended a request."""
        self._num_failures, self._num_verdicts = 0, self._num_verdicts + 1

    @property
    def reason_to_give_up(self) -> str | None:
        """The reason why new ranks would fail too; None while they may serve."""
        if self._num_failures > MAX_FAILURES_WITHOUT_PROGRESS:
            return f"{self._num_failures} consecutive groups of ranks did not complete a step"
        if self._num_verdicts > MAX_VERDICTS_WITHOUT_PROGRESS:
            return f"{self._num_verdicts} consecutive requests got the quarantine verdict and no step completed"
        return None
