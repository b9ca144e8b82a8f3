"""The quarantine's verdict: the request that makes the ranks fail, or the ranks themselves."""

import pytest

from llama_core.errors import PoisonRequest, RankFailure
from llama_core.scheduling.quarantine import (
    CANARY_TOKENS,
    FAILURES_BEFORE_QUARANTINE,
    MAX_FAILURES_WITHOUT_PROGRESS,
    UNRELATED_AFTER_S,
    FailureStreak,
    Quarantine,
)
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams

DEATH, ERROR = RankFailure("rank 1 died"), RankFailure("rank 1 raised", raised=True)


def a_request(owner: str = "") -> Sequence:
    return Sequence([1, 2, 3], SamplingParams(), 40, terms=Terms(owner))


def quarantined(quarantine: Quarantine, *others: Sequence) -> Sequence:
    seq = a_request()
    for _ in range(FAILURES_BEFORE_QUARANTINE):
        quarantine.ranks_failed([seq, *others])
        for other in others:
            other.tokens += [7] * 10
            quarantine.tokens_sampled(other)
    return seq


def test_a_token_past_the_position_of_the_failure_clears_the_record() -> None:
    quarantine, seq = Quarantine(), a_request()
    seq.scheduled, seq.inflight = 3, 1
    quarantine.ranks_failed([seq])
    quarantine.tokens_sampled(seq)
    assert quarantine.num_failures(seq) == 1 and not seq.is_trusted, "this position was in flight at the failure"
    seq.tokens.append(9)
    quarantine.tokens_sampled(seq)
    assert quarantine.num_failures(seq) == 0 and seq.is_trusted


def test_a_quarantined_request_runs_only_beside_trusted_requests() -> None:
    quarantine, other, third = Quarantine(), a_request(), a_request()
    assert quarantine.admits(other, [third]), "without a failure any request runs beside any other"
    seq = quarantined(quarantine, other)
    assert other.is_trusted and quarantine.admits(seq, [other])
    assert not quarantine.admits(seq, [other, third]), "the ranks have sampled nothing for the third"
    assert not quarantine.admits(third, [seq])
    quarantine.ranks_replaced([seq, other])
    assert not quarantine.admits(seq, [other]), "the new ranks have sampled nothing for it"


@pytest.mark.parametrize(("failure", "num_failures"), [(ERROR, 2), (DEATH, 4)])
def test_the_verdict_needs_two_reported_errors_or_four_deaths(failure: RankFailure, num_failures: int) -> None:
    quarantine = Quarantine()
    seq = quarantined(quarantine)
    for _ in range(num_failures - 1):
        assert quarantine.verdict([seq], failure) is None
    assert quarantine.verdict([seq, a_request()], failure) is seq
    assert isinstance(seq.error, PoisonRequest)


def test_no_quarantined_request_runs_beside_the_canary() -> None:
    quarantine = Quarantine()
    assert quarantine.new_canary([], 2) is None, "nothing is quarantined"
    seq = quarantined(quarantine)
    canary = quarantine.new_canary([a_request("a"), seq], 2)
    assert (
        canary is not None
        and canary.terms.owner == seq.terms.owner
        and canary.max_length == canary.length + CANARY_TOKENS
    )
    assert not quarantine.admits(seq, [canary])
    quarantine.ended(canary)
    assert quarantine.admits(seq, [])


def test_recovery_stops_after_consecutive_failures_without_a_step_between_them() -> None:
    streak = FailureStreak()
    for _ in range(MAX_FAILURES_WITHOUT_PROGRESS):
        streak.failed(0, 1.0)
    assert streak.reason_to_give_up is None
    streak.failed(0, 1.0)
    assert "did not complete a step" in str(streak.reason_to_give_up)
    streak.failed(1, 1.0)
    assert streak.reason_to_give_up is None, "a step completed"


def test_a_failure_long_after_the_recovery_is_not_counted_as_consecutive() -> None:
    streak = FailureStreak()
    for _ in range(10 * MAX_FAILURES_WITHOUT_PROGRESS):
        streak.failed(0, UNRELATED_AFTER_S + 1)
    assert streak.reason_to_give_up is None
