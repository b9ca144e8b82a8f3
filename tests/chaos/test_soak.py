"""What the soak calls a success, and what growth. `make test` runs its short form beside the other tests."""

import argparse
from typing import Any

import pytest

from tests.chaos.from_outside import leaks
from tests.chaos.soak import pause_after, report, trend

STEADY = {
    "ranks": 4.0, "threads": 200.0, "anonymous MB": 500.0, "descriptors": 300.0, "sockets": 150.0, "shared memory files": 9.0
}  # fmt: skip


class Streams:
    def __init__(self, num_lost: int) -> None:
        self.lost, self.differing, self.times = ["lost"] * num_lost, [], [[1.0, 2.0, 5.5]]
        self.num_answers = 2000


def reported(num_lost: int, after: dict[str, float]) -> dict[str, Any]:
    options = argparse.Namespace(seconds=60.0, streams=8, ranks=2)
    return report(options, Streams(num_lost), [2.5], [0.7], [STEADY, STEADY], after)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STEADY)
def test_growth_and_lost_answers_fail_a_soak(name: str) -> None:
    assert reported(0, STEADY)["grown"] == []
    assert reported(0, STEADY | {name: STEADY[name] * 2 + 100})["grown"] != []
    assert reported(2, STEADY)["success"] == 0.999 and reported(3, STEADY)["success"] < 0.999


def test_the_pause_of_a_stream_is_from_the_kill_to_its_next_token() -> None:
    assert reported(0, STEADY)["first_new_token_s"]["median"] == 3.0
    assert pause_after(0.5, [1.0, 2.0]) == pause_after(3.0, [1.0, 2.0]) == 0.0, "not begun, or over"


def test_a_trend_compares_the_first_quarter_with_the_last() -> None:
    assert trend([1, 1, 2, 9, 3, 3, 5, 5]) == {"first": 1, "last": 5, "most": 9}


def test_nothing_less_than_before_is_a_leak() -> None:
    assert leaks(STEADY, {name: value / 2 for name, value in STEADY.items()}, 4) == []
