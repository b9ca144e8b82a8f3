"""Connections in memory between processes that are simulated in one event loop, and the faults of both.

A process is what its context says: `Process.run` starts its first task, and the tasks, timers and connections that come of it
are its own. A test's own tasks belong to none, and never stand still.
"""

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

Result = TypeVar("Result")
KERNEL_BYTES = 256 * 1024  # that a connection holds outside of both processes
DELAY_S = 0.0001  # of what one end sends to the other
RETRY_CONNECT_S = 1.0  # the kernel's, of a first packet without an answer

_here: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class Process:
    """Stands still as one, and is one end of a partition."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.stands_still = False
        self.has_power = True
        self.held: list[Any] = []  # handles
        self.held_timers: list[Any] = []

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        context = contextvars.copy_context()
        context.run(_here.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)

    def call(self, function: Callable[[], Result]) -> Result:
        """At once, as this process."""
        context = contextvars.copy_context()
        context.run(_here.set, self)
        return context.run(function)

    @staticmethod
    def of(context: contextvars.Context) -> "Process | None":
        return context.get(_here)

    def __repr__(self) -> str:
        return f"Process({self.name!r})"


Side = Process | None


class End(asyncio.Transport):
    """One end of a connection. `inbox`: what the other end has sent, with the time of its arrival; None is its FIN."""

    def __init__(self, network: "Network", protocol: Any, context: contextvars.Context, family: int) -> None:
        super().__init__()
        self.protocol, self.context, self.process = protocol, context, Process.of(context)
        self.peer: End
        self.inbox: deque[tuple[float, bytes | None]] = deque()
        self.is_closed = False
        self._network = network
        self._is_made = False
        self._socket = SimpleNamespace(family=family, setsockopt=lambda *args: None, fileno=lambda: -1)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self._network.carry(self, bytes(data))

    def close(self) -> None:
        if not self.is_closed:
            self.vanish()
            self._network.carry(self, None)
            self._network.loop.call_soon(self.protocol.connection_lost, None, context=self.context)

    abort = close

    def vanish(self) -> None:
        """Neither end is told."""
        self.is_closed = True
        self.inbox.clear()
        self._network.ends.remove(self)

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return max(0, sum(len(data or b"") for _, data in self.peer.inbox) - KERNEL_BYTES)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self._socket}.get(name, default)

    def make(self) -> None:
        self._is_made = True
        self.protocol.connection_made(self)

    def deliver(self) -> None:
        """Give the protocol all that has arrived, in one piece."""
        if self.is_closed:
            return
        if not self._is_made:
            self.make()
        data, has_ended = b"", False
        while self.inbox and self.inbox[0][0] <= self._network.loop.time():
            _, piece = self.inbox.popleft()
            has_ended |= piece is None
            data += piece or b""
        try:
            if data:
                self.protocol.data_received(data)
        except Exception:
            self.close()
            raise
        if has_ended and not self.is_closed:
            self.protocol.eof_received()
            self.close()


class Listener:
    """A server's socket, in the form of asyncio.Server."""

    def __init__(self, network: "Network", address: str | int, protocol_factory: Any) -> None:
        self.context, self.protocol_factory = contextvars.copy_context(), protocol_factory
        self.address = address
        self.sockets = [SimpleNamespace(getsockname=lambda: ("127.0.0.1", address))]
        self.port = address
        self._network = network
        assert address not in network.listeners, "the address is in use"
        network.listeners[address] = self

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]
        self.sockets = []

    async def wait_closed(self) -> None:
        pass

    def is_serving(self) -> bool:
        return bool(self.sockets)


class Network:
    """`delay_s`: of what one process sends to another, where it is not DELAY_S. `jitter`: factors of both, which change the
    order of what several connections bring. `silent`: (sender, receiver) between which nothing arrives until `heal`, as in a
    partition, and since when: it is not lost, and neither end is told."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take_up: Callable[[Process], None]) -> None:
        """take_up: run what a process has left undone while it stood still."""
        self.loop, self._take_up = loop, take_up
        self.delay_s: dict[tuple[Side, Side], float] = {}
        self.jitter: Callable[[], float] = lambda: 1.0
        self.silent: dict[tuple[Side, Side], float] = {}
        self.listeners: dict[str | int, Listener] = {}
        self.ends: list[End] = []
        self._arrivals: list[tuple[float, int, End]] = []
        self._count = itertools.count()
        self._faulty: dict[Process, None] = {}

    # Faults.

    def silence(self, sender: Side, receiver: Side, *, both: bool = True) -> None:
        """Nothing that `sender` sends arrives any more; both: nor the other way."""
        for pair in ((sender, receiver), (receiver, sender))[: 1 + both]:
            self.silent.setdefault(pair, self.loop.time())

    def heal(self, sender: Side = None, receiver: Side = None) -> None:
        """End the silence of two processes, or every silence. What was sent meanwhile arrives now."""
        if sender is receiver is None:
            self.silent.clear()
        for pair in ((sender, receiver), (receiver, sender)):
            self.silent.pop(pair, None)
        self._look_again()

    def stop(self, process: Process) -> None:
        """It stands still, as after SIGSTOP: what is sent to it waits, and its timers are due when it goes on."""
        process.stands_still = True
        self._faulty[process] = None

    def lose_power(self, process: Process) -> None:
        """It does nothing any more, and nobody is told."""
        self.stop(process)
        process.has_power = False

    def kill(self, process: Process) -> None:
        """It does nothing any more, and its connections end."""
        self.stop(process)
        for listener in list(self.listeners.values()):
            if Process.of(listener.context) is process:
                listener.close()
        for end in [end for end in self.ends if end.process is process]:
            end.vanish()
            self.carry(end, None)

    def go_on(self, process: Process) -> None:
        process.stands_still, process.has_power = False, True
        self._take_up(process)
        self._faulty.pop(process, None)
        self._look_again()

    def end_faults(self) -> None:
        """Every process can end as it would, also one that was killed, which has no connection."""
        for process in list(self._faulty):
            self.go_on(process)
        self.heal()

    # For the loop and the ends of connections.

    async def connect(self, protocol: Any, address: str | int, family: int) -> End:
        context = contextvars.copy_context()
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        client, server = Process.of(context), Process.of(listener.context)
        while self._is_silent(client, server) or self._is_silent(server, client):  # noqa: ASYNC110
            await asyncio.sleep(RETRY_CONNECT_S)
        await asyncio.sleep(self._delay_s(client, server) + self._delay_s(server, client))
        if self.listeners.get(address) is not listener:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        end = End(self, protocol, context, family)
        end.peer = End(self, listener.context.copy().run(listener.protocol_factory), listener.context.copy(), family)
        end.peer.peer = end
        self.ends += [end, end.peer]
        end.make()
        self.carry(end, b"")
        return end

    def carry(self, sender: End, data: bytes | None) -> None:
        receiver = sender.peer
        if receiver.is_closed:
            return
        due_s = self.loop.time() + self._delay_s(sender.process, receiver.process)
        if receiver.inbox:
            due_s = max(due_s, receiver.inbox[-1][0])
        receiver.inbox.append((due_s, data))
        heapq.heappush(self._arrivals, (due_s, next(self._count), receiver))

    def next_s(self) -> float | None:
        """When something arrives next; None if nothing is on its way to a process that can read it."""
        while self._arrivals and self._waits(self._arrivals[0][2]):
            heapq.heappop(self._arrivals)
        return self._arrivals[0][0] if self._arrivals else None

    def arrived(self) -> list[End]:
        """The ends that have something to read now."""
        found: dict[End, None] = {}
        while (due_s := self.next_s()) is not None and due_s <= self.loop.time():
            found[heapq.heappop(self._arrivals)[2]] = None
        return list(found)

    def _waits(self, end: End) -> bool:
        """Whether what was sent to this end cannot arrive now. `_look_again` finds it later."""
        sender, receiver = end.peer.process, end.process
        is_still = receiver is not None and receiver.stands_still
        return not end.inbox or is_still or self._is_silent(sender, receiver)

    def _delay_s(self, sender: Side, receiver: Side) -> float:
        return self.delay_s.get((sender, receiver), DELAY_S) * self.jitter()

    def _is_silent(self, sender: Side, receiver: Side) -> bool:
        has_power = all(side is None or side.has_power for side in (sender, receiver))
        return not has_power or (sender, receiver) in self.silent

    def _look_again(self) -> None:
        for end in self.ends:
            if end.inbox:
                heapq.heappush(self._arrivals, (end.inbox[0][0], next(self._count), end))
