"""The waits of tests/support/waiting.py end at their deadline and name the condition. No test needs a fast or quiet machine."""

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

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


# Test files that may read a clock, and what for.
CLOCKS = {
    "benchmarks/gpu/test_program.py": "begins a run in the past",
    "cluster/driver/test_group_start.py": "brings a deadline forward",
    "deployments/engine/test_step_pacing.py": "its clock is virtual",
    "deployments/tracing/test_request_spans.py": "compares the order of times, not their differences",
    "llama_core/execution/test_gpu.py": "compares a part of a step's time with all of it",
}
CLOCK = re.compile(r"(time|monotonic|perf_counter|process_time|thread_time)(_ns)?")


def test_no_test_compares_a_time_with_a_number() -> None:
    """A slow or busy machine would fail it. `tests/support/processor_time.py` has times to compare with each other."""
    tests = Path(__file__).parent
    reading = set()
    for file in tests.rglob("test_*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = [call.func.attr for call in calls if isinstance(call.func, ast.Attribute) and not call.args]
        if any(map(CLOCK.fullmatch, names)):
            reading.add(str(file.relative_to(tests)))
    assert reading == CLOCKS.keys()
