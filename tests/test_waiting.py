"""The waits of tests/support/waiting.py end at their deadline and name the condition."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.waiting import until, until_true, wait_until


def test_a_wait_returns_the_first_true_answer() -> None:
    answers: Iterator[int] = iter([0, 0, 7])
    assert wait_until("an answer", lambda: next(answers), 60, 0) == 7


def test_a_wait_fails_at_its_deadline_with_the_condition_and_the_last_answer() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.01 s: two replicas \(last answer: \[\]\)"):
        wait_until("two replicas", list, 0.01, 0)


async def test_an_asynchronous_wait_fails_at_its_deadline_also_when_its_look_hangs() -> None:
    async def hang() -> bool:
        await asyncio.sleep(3600)
        return True

    with pytest.raises(AssertionError, match=r"not within 0.01 s: an answer"):
        await until("an answer", hang, 0.01)
    with pytest.raises(AssertionError, match=r"not within 0.01 s: a step"):
        await until_true("a step", lambda: False, 0.01, 0)
