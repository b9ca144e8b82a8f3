"""The criteria of the soak and of the chaos run: success, growth, detection times, pauses."""

import argparse
from datetime import datetime
from typing import Any

import pytest

from tests.chaos.__main__ import Fault, is_seen_in_time
from tests.chaos.__main__ import report as report_of_chaos
from tests.chaos.from_outside import leaks
from tests.chaos.soak import is_passed, pause_after, report, trend

STEADY = {
    "ranks": 4.0, "threads": 200.0, "anonymous MB": 500.0, "descriptors": 300.0, "sockets": 150.0, "shared memory files": 9.0
}  # fmt: skip


class Streams:
    def __init__(self, num_lost: int, num_differing: int) -> None:
        self.lost, self.differing = ["lost"] * num_lost, ["differs"] * num_differing
        self.times = [[1.0, 2.0, 5.5]]
        self.num_answers = 2000

    def endings(self) -> dict[str, int]:
        return {"greedy: length": 8}


def reported(after: dict[str, float] = STEADY, *, lost: int = 0, differing: int = 0, kills: int = 1) -> dict[str, Any]:
    options = argparse.Namespace(seconds=60.0, streams=8, ranks=2)
    streams: Any = Streams(lost, differing)
    return report(options, streams, [2.5] * kills, [0.7] * kills, [STEADY] * kills, after)


@pytest.mark.parametrize("name", STEADY)
def test_a_soak_fails_on_growth_and_on_lost_answers(name: str) -> None:
    assert is_passed(reported())
    assert not is_passed(reported(STEADY | {name: STEADY[name] * 2 + 100}))
    assert is_passed(reported(lost=2)) and not is_passed(reported(lost=3)), "of 2,000"
    assert not is_passed(reported(differing=1)) and not is_passed(reported(kills=0))


def test_the_pause_of_a_stream_is_from_the_kill_to_its_next_token() -> None:
    assert reported()["first_new_token_s"]["median"] == 3.0
    assert pause_after(0.5, [1.0, 2.0]) == pause_after(3.0, [1.0, 2.0]) == 0.0, "the stream had not begun, or was over"
    assert pause_after(2.0, [1.0, 2.0, 2.01, 2.02, 4.0, 9.0]) == 2.0, "two tokens of the old ranks were in flight"


def test_a_trend_compares_the_first_quarter_with_the_last() -> None:
    assert trend([1, 1, 2, 9, 3, 3, 5, 5]) == {"first": 1, "last": 5, "most": 9}


def test_a_smaller_footprint_is_no_leak() -> None:
    assert leaks(STEADY, {name: value / 2 for name, value in STEADY.items()}, 4) == []


def test_a_fault_that_is_detected_too_late_fails_the_chaos_run() -> None:
    in_time = {"death": {"p99": 0.9}, "error": None, "hang": {"p99": 3.9}}
    assert is_seen_in_time(in_time, 3.0)
    assert not is_seen_in_time(in_time | {"death": {"p99": 1.1}}, 3.0)
    assert not is_seen_in_time(in_time | {"hang": {"p99": 4.1}}, 3.0)


def test_a_pause_is_measured_from_its_first_and_from_its_last_fault() -> None:
    began = datetime(2026, 1, 1).timestamp()
    output = "2026-01-01 00:00:01,000 recovering\n2026-01-01 00:00:08,000 recovered after 7.0 s\n"
    faults = [
        Fault("kill", 0, "any", began + 0.9), Fault("stop", 1, "load", began + 5), Fault("slow", 0, "load", began + 6)
    ]  # fmt: skip
    streams: Any = Streams(0, 0)
    streams.times = [[began + 0.5, began + 8.5, began + 8.6]]
    options = argparse.Namespace(streams=1, ranks=2, standby=False)
    told = report_of_chaos(options, faults, streams, output, STEADY, STEADY)
    assert told["first_new_token_s"]["median"] == pytest.approx(7.5)
    assert told["first_new_token_after_the_last_fault_s"]["median"] == pytest.approx(3.5)
    assert told["detection_s"]["death"]["median"] == pytest.approx(0.1)
