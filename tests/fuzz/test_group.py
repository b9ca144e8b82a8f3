"""A rank group's operations in random orders, and injected bugs that the invariants must detect."""

import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from cluster.driver import fan_out
from cluster.driver.fan_out import FanOut
from cluster.rank.step_executor import StepExecutor
from cluster.wire import messages as wire
from tests.fuzz import group


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of refusals would be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_ten_thousand_random_operations_break_no_rule() -> None:
    outcome = group.run(10_000, seed=Random().randrange(10**6))
    assert outcome.findings == []
    assert outcome.cases >= 10_000 and outcome.counts["rank: driver left"] and outcome.counts["bytes: refused"]


def _take_any_epoch(fan: FanOut, rank: int, payload: bytes) -> None:
    right = b"\xa5epoch\x03"
    _on_payload(fan, rank, payload.replace(b"\xa5epoch\x02", right).replace(b"\xa5epoch\x04", right))


def _serve_on(fan: FanOut, rank: int, cause: str, *, certain: bool = True) -> None:
    """An injected bug: a group that ignores every failure."""


def _forget_one(fan: FanOut, failure: Any) -> None:
    if fan._in_flight:
        fan._in_flight.pop()
    _fail(fan, failure)


_on_payload, _fail = FanOut._on_payload, FanOut.fail


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "any epoch": (FanOut, "_on_payload", _take_any_epoch),
    "no sign counts": (FanOut, "note_failure_sign", _serve_on),
    "a step is forgotten": (FanOut, "fail", _forget_one),
    "a late verdict": (fan_out, "_SECOND_SIGN_S", 5.0),
    "errors escape": (wire, "UNREADABLE", (UnicodeDecodeError,)),
    "no answer": (StepExecutor, "_answer", lambda executor, output: None),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_group_with_an_injected_bug_breaks_a_rule(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(*FAULTS[what])
    assert group.run(5000, seed=1).num_findings
