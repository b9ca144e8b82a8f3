"""Which seats are tried: those that served, then the most over which the model can be split, never before its time."""

import pytest

from deployments.engine.recovery_plan import ENOUGH_ATTEMPTS, Attempts
from llama_core.config import read_params

ALL = [0, 1, 2, 3]


def attempts(*, patience_s: float = 60.0, least: int = 1, is_growth: bool = False, seats: list[int] = ALL) -> Attempts:
    """Of a model that can be split over 4, 2 and 1 ranks."""
    return Attempts(read_params("demo", vocab_size=1280), ALL, seats, is_growth, patience_s, least)


def test_those_that_served_are_taken_if_they_are_there() -> None:
    assert attempts().choose(ALL) == ALL
    assert attempts(patience_s=0.0).choose(ALL) == ALL
    assert attempts(seats=[1, 3]).choose(ALL) == [1, 3], "more are tried when all is well again"


def test_fewer_are_taken_only_once_it_takes_too_long() -> None:
    assert attempts().choose([0, 2, 3]) == []
    assert attempts(patience_s=0.0).choose([0, 2, 3]) == [0, 2]
    assert attempts(patience_s=0.0).choose([3]) == [3]
    assert attempts(patience_s=0.0).choose([]) == []
    assert attempts(patience_s=0.0, least=2).choose([3]) == []


def test_where_it_is_to_grow_all_are_tried_once() -> None:
    growing = attempts(is_growth=True, seats=[0, 2])
    assert growing.choose(ALL) == ALL
    assert growing.choose([0, 1, 2]) == [0, 2], "the room is gone again"
    growing.failed.append(None)
    assert growing.choose(ALL) == [0, 2]


@pytest.mark.parametrize("failed", [[2] * ENOUGH_ATTEMPTS, [1, None, *[2] * ENOUGH_ATTEMPTS]])
def test_a_seat_that_fails_again_and_again_is_left_out_once_it_takes_too_long(failed: list[int | None]) -> None:
    patient, impatient = attempts(), attempts(patience_s=0.0)
    patient.failed = impatient.failed = failed
    assert patient.choose(ALL) == ALL and impatient.choose(ALL) == [0, 1]


def test_a_seat_that_nothing_can_be_done_without_is_tried_again_and_again() -> None:
    for all_, least in ((ALL, 4), ([0], 1)):
        impatient = attempts(patience_s=0.0, least=least, seats=all_)
        impatient.failed = [all_[-1]] * ENOUGH_ATTEMPTS
        assert impatient.choose(all_) == all_


def test_several_seats_that_fail_in_turn_tell_nothing() -> None:
    unlucky = attempts(patience_s=0.0)
    unlucky.failed = [1, 2] * ENOUGH_ATTEMPTS
    assert unlucky.choose(ALL) == ALL
