"""An event loop with virtual time: a timer is due as soon as no callback is ready."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.SelectSelector):
    """Returns at once and advances the virtual time by the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits, and no timer is due"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`errors`: exceptions of callbacks, which asyncio would only log."""

    def __init__(self) -> None:
        self._selector_of_time = _Selector()
        super().__init__(self._selector_of_time)
        self.errors: list[str] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._selector_of_time.now

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run function(*args) inside the loop, and all callbacks that it makes ready."""

        async def inside() -> Result:
            result = function(*args)
            for _ in range(3):
                await asyncio.sleep(0)
            return result

        return self.run_until_complete(inside())

    def wait(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
