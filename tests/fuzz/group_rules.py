"""The operations of ranks and of other senders on a fan-out, and what must hold after each.

Connections are real except for their sockets: a rank's bytes wait until they are delivered, in any pieces.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from cluster.driver.fan_out import FanOut
from cluster.wire.messages import Ack, Answer, Deframer, Fault, Hello, decode_step, frame
from cluster.wire.transport import RankConnection, RankListener
from llama_core.errors import RankFailure
from llama_core.scheduling.step import Row, StepInput, StepOutput
from tests.support.virtual_loop import VirtualLoop

EPOCH = 3
SECOND_SIGN_S = 0.25  # slightly longer than the fan-out waits after an uncertain sign of failure


class Wire(asyncio.Transport):
    """The driver's end of a connection. The test is the other end."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_closed = False
        self._loop, self._protocol = loop, protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self.sent += data

    def abort(self) -> None:
        self.lose(None)

    def lose(self, error: Exception | None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def receive(self, data: bytes) -> None:
        if not self.is_closed:
            self._protocol.data_received(data)


@dataclass
class Rank:
    """A rank that the test simulates. said: all its bytes, of which `num_delivered` have arrived; ends: in it, of its due
    answers. fatal_at: it has certainly failed when so many have arrived. is_tampered: its bytes have no defined meaning."""

    connection: RankConnection
    wire: Wire
    deframer: Deframer = field(default_factory=Deframer)
    owed: list[StepInput] = field(default_factory=list)
    last: Answer | Ack | None = None
    said: bytearray = field(default_factory=bytearray)
    num_delivered: int = 0
    ends: list[int] = field(default_factory=list)
    fatal_at: float = math.inf
    is_tampered: bool = False


class GroupBench:
    """A fan-out in a loop with a virtual clock, and its ranks. steps: with their results, and whether these were cancelled."""

    def __init__(self, loop: VirtualLoop, num_ranks: int, step_timeout_s: float = 1.0) -> None:
        self.loop, self.num_ranks, self.step_timeout_s = loop, num_ranks, step_timeout_s
        loop.errors.clear()
        self.failures: list[RankFailure] = []
        self.overdue: list[tuple[list[int], float]] = []
        self.steps: list[tuple[StepInput, asyncio.Future[StepOutput]]] = []
        self.cancelled: set[int] = set()
        self.is_provoked = False  # some operation may have failed the group
        self.must_fail_by = math.inf
        loop.call(self._open)
        assert not self.listener.unproven, "a refused connection is kept"

    def _open(self) -> None:
        self.listener = RankListener(EPOCH, self.num_ranks, None)
        self.ranks = []
        secret = self.listener._secret
        for rank in range(self.num_ranks):
            for hello in (
                *(Hello(EPOCH, rank, b""), Hello(EPOCH, rank, bytes(32)), Hello(EPOCH - 1, rank, secret)),
                *(Hello(EPOCH, -1, secret), Hello(EPOCH, self.num_ranks, secret), Hello(EPOCH, rank - 1, secret)),
            ):
                stranger, wire = self._connection()
                wire.receive(frame(hello))
                assert stranger.rank is None and wire.is_closed, hello
            connection, wire = self._connection()
            wire.receive(frame(Hello(EPOCH, rank, secret)))
            assert connection.rank == rank
            self.ranks.append(Rank(connection, wire))
        self.fan_out = FanOut(
            [rank.connection for rank in self.ranks],
            epoch=EPOCH,
            step_timeout_s=self.step_timeout_s,
            on_failure=self.failures.append,
            on_overdue=self._on_overdue,
        )

    def _connection(self) -> tuple[RankConnection, Wire]:
        connection = RankConnection(self.listener)
        wire = Wire(self.loop, connection)
        connection.connection_made(wire)
        return connection, wire

    def _on_overdue(self, silent: list[int], waited_s: float) -> None:
        """Names a rank as failed, as `RankGroup` does."""
        self.overdue.append((silent, waited_s))
        assert silent, "a step is overdue, but every rank has answered"
        assert waited_s <= self.step_timeout_s, "no deadline is longer"
        self.is_provoked = True
        self.fan_out.note_failure_sign(silent[0], "hangs")

    # Operations.

    def submit(self, num_samples: int = 1) -> None:
        batch = StepInput(EPOCH, len(self.steps), [Row(slot, 0, 1, True) for slot in range(num_samples)])
        if self.fan_out.failure is not None:
            with suppress(RankFailure):
                self.loop.call(self.fan_out.submit, batch)
                raise AssertionError("a failed fan-out takes a step")
            return
        self.steps.append((batch, self.loop.call(self.fan_out.submit, batch)))
        for rank in self.ranks:
            received = [decode_step(payload) for payload in rank.deframer.feed(bytes(rank.wire.sent))]
            rank.wire.sent.clear()
            assert rank.wire.is_closed or received == [batch], "every rank gets every step unchanged"
            rank.owed += received

    def answer(self, index: int) -> None:
        """Send the answer that is due."""
        rank = self.ranks[index]
        if rank.owed:
            rank.last = self.due(index, rank.owed.pop(0))
            rank.said += frame(rank.last)
            rank.ends.append(len(rank.said))

    def all_answer(self, order: list[int] | None = None) -> None:
        for index in range(self.num_ranks) if order is None else order:
            self.answer(index)
            self.deliver(index, 10_000)

    def due(self, index: int, batch: StepInput) -> Answer | Ack:
        tokens = [batch.step * 1000 + row.slot for row in batch.rows]
        return Answer(StepOutput(EPOCH, batch.step, tokens)) if index == 0 else Ack(EPOCH, batch.step, index)

    def say(self, index: int, message: Answer | Ack | Fault) -> None:
        """Send what certainly fails this rank."""
        rank = self.ranks[index]
        rank.said += frame(message)
        self.is_provoked = True
        if not rank.is_tampered:
            rank.fatal_at = min(rank.fatal_at, len(rank.said))

    def wrong_answer(self, index: int, draw: Random) -> None:
        """Send an answer that is not due. It must be refused, also while a step is in flight."""
        rank = self.ranks[index]
        step = rank.owed[0].step if rank.owed else len(self.steps)
        num_samples = len(rank.owed[0].rows) if rank.owed else 1
        numbers = [(EPOCH - 1, step), (EPOCH + 1, step), (EPOCH, step + 1), (EPOCH, step - 1)]
        messages: list[Answer | Ack | Fault] = [
            Answer(StepOutput(*each, [0] * num_samples)) if index == 0 else Ack(*each, index) for each in numbers
        ]
        messages += [
            Ack(EPOCH, step, index + 1),  # another rank's
            Fault(EPOCH, index, "ValueError", "no such slot", False),
            Fault(EPOCH, index, "RuntimeError", "gloo: closed", True),
            *([rank.last] if rank.last is not None else []),  # a second time
            # A later step may have this number when the bytes arrive.
            *([Answer(StepOutput(EPOCH, step, [0] * (num_samples + 1)))] if rank.owed else []),
        ]
        self.say(index, draw.choice(messages))

    def damage(self, index: int, change: Callable[[bytes], bytes]) -> None:
        """Change what is on its way."""
        rank = self.ranks[index]
        rank.said[rank.num_delivered :] = change(bytes(rank.said[rank.num_delivered :]))
        rank.is_tampered = self.is_provoked = True
        rank.fatal_at = math.inf

    def deliver(self, index: int, num_bytes: int) -> None:
        rank = self.ranks[index]
        piece = bytes(rank.said[rank.num_delivered : rank.num_delivered + num_bytes])
        rank.num_delivered += len(piece)
        rank.is_tampered |= rank.wire.is_closed  # no more bytes arrive
        if rank.num_delivered >= rank.fatal_at:
            self._will_fail()
        self.loop.call(rank.wire.receive, piece)

    def close(self, index: int, *, is_error: bool = False) -> None:
        """The rank dies. Bytes in flight are lost."""
        self._will_fail()
        rank = self.ranks[index]
        del rank.said[rank.num_delivered :]
        self.loop.call(rank.wire.lose, ConnectionResetError("reset") if is_error else None)

    def note_failure_sign(self, index: int, *, certain: bool) -> None:
        self._will_fail()
        self.loop.call(lambda: self.fan_out.note_failure_sign(index, "is told to be dead", certain=certain))

    def fail(self) -> None:
        self._will_fail()
        self.loop.call(self.fan_out.fail, RankFailure("told to"))

    def cancel(self, number: int) -> None:
        """Cancel the future of a step."""
        if self.steps:
            number %= len(self.steps)
            self.cancelled |= {number} if self.loop.call(self.steps[number][1].cancel) else set()

    def stranger(self, data: bytes) -> None:
        """A foreign process connects and sends these bytes. The group never sees them."""
        connection, wire = self.loop.call(self._connection)
        self.loop.call(wire.receive, data)
        self.loop.call(wire.lose, None)
        assert connection.rank is None and wire.is_closed
        assert connection not in self.listener.unproven

    def _will_fail(self) -> None:
        self.is_provoked = True
        self.must_fail_by = min(self.must_fail_by, self.loop.time() + SECOND_SIGN_S)

    # Invariants.

    def check(self) -> None:
        assert not self.loop.errors, f"a callback raised: {self.loop.errors}"
        failure = self.fan_out.failure
        assert self.failures == ([] if failure is None else [failure]), "a failure is reported once"
        if failure is None:
            assert self.loop.time() <= self.must_fail_by, "the group did not fail"
            since_s = self.loop.time() - self.fan_out._oldest_since
            assert not self.fan_out.num_in_flight or since_s <= self.step_timeout_s + 1e-6, "no failure at the deadline"
        else:
            assert self.is_provoked, f"a failure without a cause: {failure}"
            assert all(result.done() for _, result in self.steps), "a step of a failed group has no result"
            assert all(rank.wire.is_closed for rank in self.ranks), "a failed group keeps a connection"
            assert not self.fan_out.num_in_flight
        first = self.ranks[0]
        num_complete = sum(end <= first.num_delivered for end in first.ends)
        for number, (batch, result) in enumerate(self.steps):
            if not result.done():
                assert first.is_tampered or number >= num_complete, "an answer arrived, but its step has no result"
            elif result.cancelled():
                assert number in self.cancelled
            elif (error := result.exception()) is not None:
                assert isinstance(error, RankFailure) and failure is not None and error is not failure
            else:
                output = result.result()
                assert (output.epoch, output.step) == (EPOCH, batch.step), "an answer of another step or epoch"
                assert len(output.tokens) == batch.num_samples
                assert first.is_tampered or Answer(output) == self.due(0, batch)

    def end(self) -> None:
        """At the end every step has a result and no timer is left."""
        self.fail()
        self.check()
        self.loop.call(self.listener.close)
        self.loop.wait(2 * self.step_timeout_s)
        self.check()
