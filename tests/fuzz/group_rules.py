"""The operations of ranks and of other senders on a fan-out, in any order, and the invariants after each.

Connections are real except for their sockets: a rank's bytes wait in a buffer and are delivered in any pieces.
"""

import asyncio
from dataclasses import dataclass, field

from cluster.driver.fan_out import FanOut
from cluster.wire.messages import (
    Ack,
    Answer,
    Deframer,
    Fault,
    Hello,
    WireError,
    decode_hello,
    decode_reply,
    decode_step,
    frame,
)
from cluster.wire.transport import RankConnection, RankListener
from llama_core.errors import RankFailure
from llama_core.scheduling.step import Row, StepInput, StepOutput
from tests.support.virtual_loop import VirtualLoop

EPOCH = 3
STEP_TIMEOUT_S = 1.0
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
    """A rank that the test simulates: its unanswered steps, and its bytes in flight."""

    connection: RankConnection
    wire: Wire
    deframer: Deframer = field(default_factory=Deframer)
    owed: list[StepInput] = field(default_factory=list)
    last: Answer | Ack | None = None
    on_its_way: bytearray = field(default_factory=bytearray)
    fatal_in: int | None = None  # bytes after whose arrival this rank certainly fails
    is_tampered: bool = False  # its bytes have no defined meaning
    num_answered: int = 0  # correct answers that were sent
    ends: list[int] = field(default_factory=list)  # for each of these, the bytes that must still arrive


@dataclass
class Sent:
    """A submitted step."""

    batch: StepInput
    result: "asyncio.Future[StepOutput]"
    at: float
    is_cancelled: bool = False


class GroupBench:
    def __init__(self, loop: VirtualLoop, num_ranks: int) -> None:
        self.loop = loop
        loop.errors.clear()
        self.failures: list[RankFailure] = []
        self.overdue: list[list[int]] = []
        self.steps: list[Sent] = []
        self.is_provoked = False  # some operation may have failed the group
        self.must_fail_by: float | None = None
        self.num_ranks = num_ranks
        loop.call(self._open)

    def _open(self) -> None:
        self.listener = RankListener(EPOCH, self.num_ranks, None)
        self.ranks = []
        for rank in range(self.num_ranks):
            connection, wire = self._connection()
            wire.receive(frame(Hello(EPOCH, rank, self.listener._secret)))
            assert connection.rank == rank
            self.ranks.append(Rank(connection, wire))
        self.fan_out = FanOut(
            [rank.connection for rank in self.ranks],
            epoch=EPOCH,
            step_timeout_s=STEP_TIMEOUT_S,
            on_failure=self.failures.append,
            on_overdue=self._on_overdue,
        )

    def _connection(self) -> tuple[RankConnection, Wire]:
        connection = RankConnection(self.listener)
        wire = Wire(self.loop, connection)
        connection.connection_made(wire)
        return connection, wire

    def _on_overdue(self, silent: list[int], waited_s: float) -> None:
        """Names a rank as failed, as `RankGroup` does, at once or later."""
        self.overdue.append(silent)
        assert silent, "a step is overdue, but every rank has answered"
        assert waited_s <= STEP_TIMEOUT_S, "no deadline is longer"
        self.is_provoked = True
        self.fan_out.note_failure_sign(silent[0], "hangs")

    # Operations.

    def submit(self, num_samples: int) -> None:
        rows = [Row(slot, 0, 1, True) for slot in range(num_samples)]
        batch = StepInput(EPOCH, len(self.steps), rows)
        if self.fan_out.failure is not None:
            try:
                self.loop.call(self.fan_out.submit, batch)
            except RankFailure:
                return
            raise AssertionError("a failed fan-out takes a step")
        result = self.loop.call(self.fan_out.submit, batch)
        self.steps.append(Sent(batch, result, self.loop.time()))
        for rank in self.ranks:
            received = [decode_step(payload) for payload in rank.deframer.feed(bytes(rank.wire.sent))]
            rank.wire.sent.clear()
            assert rank.wire.is_closed or received == [batch], "every rank gets every step unchanged"
            rank.owed += received

    def answer(self, index: int) -> None:
        """Send the answer that is due."""
        rank = self.ranks[index]
        if rank.owed:
            batch = rank.owed.pop(0)
            rank.last = self.due(index, batch)
            rank.on_its_way += frame(rank.last)
            rank.ends.append(len(rank.on_its_way))
            rank.num_answered += 1

    def due(self, index: int, batch: StepInput) -> Answer | Ack:
        tokens = [batch.step * 1000 + row.slot for row in batch.rows]
        return Answer(StepOutput(EPOCH, batch.step, tokens)) if index == 0 else Ack(EPOCH, batch.step, index)

    def say(self, index: int, data: bytes, *, is_fatal: bool) -> None:
        """Send bytes that certainly fail this rank, or that have no defined meaning."""
        rank = self.ranks[index]
        rank.on_its_way += data
        self.is_provoked = True
        if is_fatal and rank.fatal_in is None and not rank.is_tampered:
            rank.fatal_in = len(rank.on_its_way)
        if not is_fatal:
            rank.is_tampered = True

    def wrong_answer(self, index: int, kind: str) -> None:
        """Send an answer that is not due. It must be refused, also while a step is in flight."""
        rank = self.ranks[index]
        step = rank.owed[0].step if rank.owed else len(self.steps)
        num_samples = len(rank.owed[0].rows) if rank.owed else 1
        messages: dict[str, Answer | Ack | Fault | None] = {
            "old epoch": _reply(index, EPOCH - 1, step, num_samples),
            "next epoch": _reply(index, EPOCH + 1, step, num_samples),
            "later step": _reply(index, EPOCH, step + 1, num_samples),
            "earlier step": _reply(index, EPOCH, step - 1, num_samples),
            "twice": rank.last,
            "as another rank": Ack(EPOCH, step, index + 1),
            # A later step may have this number when the bytes arrive.
            "a token too many": Answer(StepOutput(EPOCH, step, [0] * (num_samples + 1))) if rank.owed else None,
            "its last words": Fault(EPOCH, index, "ValueError", "no such slot", False),
            "the last words of many": Fault(EPOCH, index, "RuntimeError", "gloo: closed", True),
        }
        if (message := messages[kind]) is not None:
            self.say(index, frame(message), is_fatal=True)

    def flip(self, index: int, bit: int) -> None:
        rank = self.ranks[index]
        if rank.on_its_way:
            bit %= 8 * len(rank.on_its_way)
            rank.on_its_way[bit // 8] ^= 1 << bit % 8
            rank.is_tampered = self.is_provoked = True
            rank.fatal_in = None

    def deliver(self, index: int, num_bytes: int) -> None:
        """Deliver `count` bytes at once."""
        rank = self.ranks[index]
        piece = bytes(rank.on_its_way[:num_bytes])
        del rank.on_its_way[:num_bytes]
        rank.ends = [end - len(piece) for end in rank.ends]
        rank.is_tampered |= rank.wire.is_closed  # no more bytes arrive
        if rank.fatal_in is not None:
            rank.fatal_in -= len(piece)
            if rank.fatal_in <= 0:
                self._will_fail()
        self.loop.call(rank.wire.receive, piece)

    def close(self, index: int, *, is_error: bool) -> None:
        """The rank dies. Bytes in flight are lost."""
        self.is_provoked = True
        self._will_fail()
        self.ranks[index].on_its_way.clear()
        self.loop.call(self.ranks[index].wire.lose, ConnectionResetError("reset") if is_error else None)

    def note_failure_sign(self, index: int, *, certain: bool) -> None:
        self.is_provoked = True
        self._will_fail()
        self.loop.call(lambda: self.fan_out.note_failure_sign(index, "is told to be dead", certain=certain))

    def fail(self) -> None:
        self.is_provoked = True
        self._will_fail()
        self.loop.call(self.fan_out.fail, RankFailure("told to"))

    def cancel(self, number: int) -> None:
        """Cancel the future of a step."""
        if self.steps:
            sent = self.steps[number % len(self.steps)]
            sent.is_cancelled |= self.loop.call(sent.result.cancel)

    def wait(self, seconds: float) -> None:
        self.loop.wait(seconds)

    def stranger(self, data: bytes) -> None:
        """A foreign process connects and sends these bytes. The group never sees them."""
        connection, wire = self.loop.call(self._connection)
        self.loop.call(wire.receive, data)
        self.loop.call(wire.lose, None)
        assert connection.rank is None and wire.is_closed
        assert connection not in self.listener.unproven

    def _will_fail(self) -> None:
        if self.must_fail_by is None:
            self.must_fail_by = self.loop.time() + SECOND_SIGN_S

    # Invariants.

    def check(self) -> None:
        assert not self.loop.errors, f"a callback raised: {self.loop.errors}"
        failure = self.fan_out.failure
        assert len(self.failures) == (failure is not None), "a failure is reported once"
        if failure is None:
            assert self.must_fail_by is None or self.loop.time() <= self.must_fail_by, "the group did not fail"
            self._check_deadline()
        else:
            assert self.is_provoked, f"a failure without a cause: {failure}"
            assert self.failures[0] is failure
            assert all(sent.result.done() for sent in self.steps), "a step of a failed group has no result"
            assert all(rank.wire.is_closed for rank in self.ranks), "a failed group keeps a connection"
            assert not self.fan_out.num_in_flight
        for number, sent in enumerate(self.steps):
            self._check_result(number, sent, failure)

    def _check_result(self, number: int, sent: Sent, failure: RankFailure | None) -> None:
        result = sent.result
        if not result.done():
            first = self.ranks[0]
            complete = first.num_answered - sum(end > 0 for end in first.ends)
            assert first.is_tampered or number >= complete, "an answer arrived, but its step has no result"
        elif result.cancelled():
            assert sent.is_cancelled
        elif (error := result.exception()) is not None:
            assert isinstance(error, RankFailure) and failure is not None and error is not failure
        else:
            output = result.result()
            assert (output.epoch, output.step) == (EPOCH, sent.batch.step), "an answer of another step or epoch"
            assert len(output.tokens) == sent.batch.num_samples
            assert self.ranks[0].is_tampered or Answer(output) == self.due(0, sent.batch)

    def _check_deadline(self) -> None:
        """A group that has not failed has no step whose answer is overdue by a second."""
        if self.fan_out.num_in_flight:
            assert self.loop.time() - self.fan_out._oldest_since <= STEP_TIMEOUT_S + 1e-6, (
                "no failure at the step deadline"
            )

    def end(self) -> None:
        """At the end every step has a result and no timer is left."""
        self.loop.call(self.fan_out.fail, RankFailure("the end"))
        self.is_provoked = True
        self.check()
        self.loop.call(self.listener.close)
        self.wait(2 * STEP_TIMEOUT_S)
        self.check()


WRONG = ("old epoch", "next epoch", "later step", "earlier step", "twice", "as another rank", "a token too many",
         "its last words", "the last words of many")  # fmt: skip


def _reply(index: int, epoch: int, step: int, num_samples: int) -> Answer | Ack:
    return Answer(StepOutput(epoch, step, [0] * num_samples)) if index == 0 else Ack(epoch, step, index)


def read_as_everything(payload: bytes) -> str:
    """Read a payload as every message type. Raises any error but a WireError."""
    taken = []
    for decode in (decode_step, decode_reply, decode_hello):
        try:
            taken.append(type(decode(payload)).__name__)
        except WireError as error:
            refused(error)
    return " and ".join(taken) or "refused"


def refused(error: WireError) -> str:
    """The refusal is short and does not repeat the input."""
    assert len(str(error)) < 1000, "an error repeats its input"
    return "refused"
