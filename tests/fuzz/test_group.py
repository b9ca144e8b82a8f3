"""A rank group's operations in orders found by hypothesis and at random, and injected bugs that the invariants must detect."""

import logging
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.driver import fan_out
from cluster.driver.fan_out import FanOut
from cluster.rank.step_executor import StepExecutor
from cluster.wire import messages as wire
from tests.fuzz import group
from tests.fuzz.group_rules import WRONG, GroupBench
from tests.support.virtual_loop import VirtualLoop


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of refusals would be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


_ranks = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    @initialize(num_ranks=st.integers(1, 3))
    def start(self, num_ranks: int) -> None:
        self.loop = VirtualLoop()
        self.bench = GroupBench(self.loop, num_ranks)

    def _rank(self, index: int) -> int:
        return index % self.bench.num_ranks

    @rule(num_samples=st.integers(0, 4))
    def submit(self, num_samples: int) -> None:
        self.bench.submit(num_samples)

    @rule(index=_ranks)
    def answer(self, index: int) -> None:
        self.bench.answer(self._rank(index))

    @rule(index=_ranks, num_bytes=st.sampled_from([1, 5, 20, 10_000]))
    def arrive(self, index: int, num_bytes: int) -> None:
        self.bench.deliver(self._rank(index), num_bytes)

    @rule(index=_ranks, kind=st.sampled_from(WRONG))
    def wrong_answer(self, index: int, kind: str) -> None:
        self.bench.wrong_answer(self._rank(index), kind)

    @rule(index=_ranks, data=st.binary(max_size=40))
    def junk(self, index: int, data: bytes) -> None:
        self.bench.say(self._rank(index), data, is_fatal=False)

    @rule(index=_ranks, bit=st.integers(0, 1000))
    def flip(self, index: int, bit: int) -> None:
        self.bench.flip(self._rank(index), bit)

    @rule(index=_ranks, is_error=st.booleans())
    def close(self, index: int, is_error: bool) -> None:
        self.bench.close(self._rank(index), is_error=is_error)

    @rule(index=_ranks, certain=st.booleans())
    def note_failure_sign(self, index: int, certain: bool) -> None:
        self.bench.note_failure_sign(self._rank(index), certain=certain)

    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        self.bench.cancel(number)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 1.5]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @rule(data=st.binary(max_size=40))
    def stranger(self, data: bytes) -> None:
        self.bench.stranger(data)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            try:
                self.bench.end()
            finally:
                self.loop.close()


TestRules = Machine.TestCase
TestRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (FanOut, "_on_payload", _take_any_epoch),
        (FanOut, "note_failure_sign", _serve_on),
        (FanOut, "fail", _forget_one),
        (fan_out, "_SECOND_SIGN_S", 5.0),
        (wire, "_UNREADABLE", (UnicodeDecodeError,)),
        (StepExecutor, "_answer", lambda executor, output: None),
    ],
    ids=["any epoch", "no sign counts", "a step is forgotten", "a late verdict", "errors escape", "no answer"],
)
def test_a_group_with_an_injected_bug_breaks_a_rule(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(where, name, fault)
    assert group.run(5000, seed=1).num_findings
