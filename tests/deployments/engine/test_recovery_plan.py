"""The bundles that a recovery tries: those that served; after the patience, as many as are usable."""

import pytest

from deployments.engine.recovery_plan import SAME_BUNDLE_ATTEMPTS, RecoveryPlan

ALL = [1, 2, 3, 4]


def plan(
    *, patience_s: float = 60.0, min_ranks: int = 1, is_growth: bool = False, bundles: list[int] = ALL
) -> RecoveryPlan:
    return RecoveryPlan(ALL, bundles, is_growth, patience_s, min_ranks)


def test_the_bundles_that_served_are_chosen_while_they_are_usable() -> None:
    assert plan().choose(ALL) == ALL
    assert plan(patience_s=0.0).choose(ALL) == ALL
    assert plan(bundles=[2, 4]).choose(ALL) == [2, 4], "growing is a recovery of its own"


def test_fewer_bundles_are_chosen_only_after_the_patience_is_over() -> None:
    assert plan().choose([1, 3, 4]) == []
    assert plan(patience_s=0.0).choose([1, 3, 4]) == [1, 3, 4]
    assert plan(patience_s=0.0).choose([4]) == [4]
    assert plan(patience_s=0.0).choose([]) == []
    assert plan(patience_s=0.0, min_ranks=2).choose([4]) == []


def test_growth_tries_all_bundles_once() -> None:
    growing = plan(is_growth=True, bundles=[1, 3])
    assert growing.choose(ALL) == ALL
    assert growing.choose([1, 2, 3]) == [1, 3], "there is no room for more ranks any longer"
    growing.failed_bundles.append(None)
    assert growing.choose(ALL) == [1, 3]


@pytest.mark.parametrize("failed", [[3] * SAME_BUNDLE_ATTEMPTS, [2, None, *[3] * SAME_BUNDLE_ATTEMPTS]])
def test_a_bundle_that_fails_repeatedly_is_left_out_after_the_patience_is_over(failed: list[int | None]) -> None:
    patient, impatient = plan(), plan(patience_s=0.0)
    patient.failed_bundles = impatient.failed_bundles = failed
    assert patient.choose(ALL) == ALL and impatient.choose(ALL) == [1, 2, 4]


def test_a_faulty_bundle_is_tried_again_where_too_few_others_are_left() -> None:
    for bundles, min_ranks in ((ALL, 4), ([1], 1)):
        impatient = plan(patience_s=0.0, min_ranks=min_ranks, bundles=bundles)
        impatient.failed_bundles = [bundles[-1]] * SAME_BUNDLE_ATTEMPTS
        assert impatient.choose(bundles) == bundles


def test_failures_of_different_bundles_mark_none_as_faulty() -> None:
    alternating = plan(patience_s=0.0)
    alternating.failed_bundles = [2, 3] * SAME_BUNDLE_ATTEMPTS
    assert alternating.choose(ALL) == ALL
