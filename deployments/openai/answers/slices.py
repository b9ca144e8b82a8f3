"""Long work on the event loop, done in slices between which other tasks run.

A thread would not help: the work holds the interpreter's lock.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Sliced = Generator[None, None, Result]  # yields between slices of about 5 ms; returns the result


async def run_in_slices(work: Sliced[Result]) -> Result:
    """The result of `work`; other tasks run wherever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Result = done.value
            return result
        await asyncio.sleep(0)
