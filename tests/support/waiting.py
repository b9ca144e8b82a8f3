"""Waits with a deadline, whose failure names the condition that did not become true; and processor time, for comparisons within
one test: a slow or busy machine changes both sides of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0  # for operations of seconds, on a machine that other tests keep busy


def wait_until(what: str, look: Callable[[], T | None], timeout_s: float = PATIENCE_S, pause_s: float = 0.05) -> T:
    """The first true answer of `look`. AssertionError with `what` and the last answer after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (answer := look()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} (last answer: {answer!r})"
        time.sleep(pause_s)
    return answer


async def until(
    what: str, look: Callable[[], Awaitable[T | None]], timeout_s: float = PATIENCE_S, pause_s: float = 0.05
) -> T:
    """As `wait_until`, for a coroutine function. The deadline also ends a call of `look` that hangs."""
    answer: T | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while not (answer := await look()):  # noqa: ASYNC110
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what} (last answer: {answer!r})") from None
    return answer


async def until_true(
    what: str, condition: Callable[[], object], timeout_s: float = PATIENCE_S, pause_s: float = 0.02
) -> None:
    """As `until`, for a plain condition of the same process."""

    async def look() -> bool:
        return bool(condition())

    await until(what, look, timeout_s, pause_s)


def processor_s(work: Callable[[], object], times: int = 3) -> float:
    """The least processor time in seconds, of all threads of this process, that `work` took in as many runs as `times`."""

    def once() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return min(once() for _ in range(times))
