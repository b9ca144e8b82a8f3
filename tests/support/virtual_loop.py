"""An event loop with a virtual clock and connections in memory. Time passes only while no callback is ready.

While the loop runs, `time.monotonic` follows its clock, and work for threads is done at once. No socket is opened.
"""

import asyncio
import heapq
import itertools
import socket
import time
from asyncio import events
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from unittest import mock

from tests.support.virtual_network import End, Listener, Network, Process

Result = TypeVar("Result")
BEGIN_S = 1_000.0  # a machine has run for a while when its programs start
MAX_RUN_S = 600.0  # of one run of the loop: nothing will end it
MAX_ROUNDS = 100_000  # without a timer or an arrival: callbacks make each other ready for ever


class VirtualLoop(asyncio.BaseEventLoop):
    """`errors`: exceptions of callbacks, which asyncio would only log. `after_each`: called after each round of callbacks.

    reads_first: asked for each arrival whether it comes before the callbacks that are ready. In asyncio's own loop none does,
    in uvloop's all do: it reads after the callbacks of a round, and runs what they have made ready in the next round.
    """

    _ready: deque[Any]  # handles
    _scheduled: list[Any]  # a heap of timers
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self, reads_first: Callable[[], bool] = lambda: False, max_run_s: float = MAX_RUN_S) -> None:
        super().__init__()
        self.network = Network(self, self._take_up)
        self.errors: list[str] = []
        self.after_each: list[Callable[[], object]] = []
        self._reads_first = reads_first
        self._now_s, self._limit_s, self._max_run_s = BEGIN_S, 0.0, max_run_s
        self._rounds = 0
        self.ports = itertools.count(20_001)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now_s

    def run_forever(self) -> None:
        self._limit_s = self._now_s + self._max_run_s
        with mock.patch.object(time, "monotonic", self.time):
            super().run_forever()

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

    async def until(self, condition: Callable[[], object]) -> None:
        """Looks after each round of callbacks."""
        found = self.create_future()

        def look() -> None:
            if not found.done() and condition():
                found.set_result(None)

        self.after_each.append(look)
        try:
            look()
            await found
        finally:
            self.after_each.remove(look)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # Connections. What these do not use of their arguments concerns real sockets and TLS.

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return Listener(self.network, str(path), protocol_factory)

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return await self._connect(protocol_factory, str(path), socket.AF_UNIX)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self._connect(protocol_factory, port, socket.AF_INET)

    async def _connect(self, protocol_factory: Any, address: str | int, family: int) -> tuple[End, Any]:
        end = await self.network.connect(protocol_factory(), address, family)
        return end, end.protocol

    # The loop.

    def _take_up(self, process: Process) -> None:
        """It goes on: with what was ready, then with what has arrived, then with the timers that are due."""
        self._ready.extend(process.held)
        for timer in process.held_timers:
            timer._scheduled = True
            heapq.heappush(self._scheduled, timer)
        process.held, process.held_timers = [], []

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        if not (self._ready or self._stopping):
            times = [handle._when for handle in self._scheduled[:1]]
            if (arrival_s := self.network.next_s()) is not None:
                times.append(arrival_s)
            assert times, "every task waits, and no timer is due"
            self._rounds = 0 if min(times) > self._now_s else self._rounds
            self._now_s = max(self._now_s, min(times))
        assert self._now_s < self._limit_s, f"the loop has run for {self._max_run_s:g} s of its time"
        self._rounds += 1
        assert self._rounds < MAX_ROUNDS, "callbacks make each other ready, and no time passes"
        self._take_arrivals()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            process = Process.of(handle._context)
            if process is not None and process.stands_still:
                process.held.append(handle)
            elif not handle._cancelled:
                handle._run()
        for check in list(self.after_each):
            check()

    def _take_arrivals(self) -> None:
        """Make what has arrived and the timers that are due ready."""
        first: list[events.Handle] = []
        for end in self.network.arrived():
            handle = events.Handle(end.deliver, (), self, end.context)
            (first if self._reads_first() else self._ready).append(handle)
        while self._scheduled and self._scheduled[0]._when <= self._now_s:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            process = Process.of(timer._context)
            if process is not None and process.stands_still:
                process.held_timers.append(timer)
            else:
                self._ready.append(timer)
        self._ready.extendleft(reversed(first))

    def _write_to_self(self) -> None:
        """Nothing waits in a system call."""

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def listener(protocol_factory: Any, *_: Any) -> Listener:
    """In place of a TlsListener, in the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return Listener(loop.network, next(loop.ports), protocol_factory)


def network() -> Network:
    """Of the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.network


class _OfTest(VirtualLoop):
    """A callback's exception fails the test."""

    def close(self) -> None:
        super().close()
        assert not self.errors, self.errors


BOTH_ORDERS: Mapping[str, Callable[[], VirtualLoop]] = {  # for `LOOPS` of a module of tests
    "reads last": _OfTest,
    "reads first": lambda: _OfTest(lambda: True),
}
AS_UVLOOP = {name: loop for name, loop in BOTH_ORDERS.items() if name == "reads first"}  # as in Serve's replicas
