"""Random late, repeated, damaged and missing answers, foreign connections and invalid bytes against a rank group."""

import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random

import msgspec

from cluster.rank.step_executor import StepExecutor
from cluster.wire.messages import FrameSocket, Hello, WireError, frame
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Grow, Pending, Row, SlotInit, StepInput, StepOutput
from tests.fuzz.group_rules import EPOCH, WRONG, GroupBench, read_as_everything, refused
from tests.fuzz.outcome import Outcome
from tests.support.virtual_loop import VirtualLoop

OPERATIONS_A_GROUP = 40


def run(cases: int, seed: int) -> Outcome:
    outcome = Outcome("group")
    loop = VirtualLoop()
    number = groups = 0
    try:
        while outcome.cases < cases:
            number += 1
            draw = Random(seed * 1_000_003 + number)
            try:
                if number % 4:
                    groups += 1
                    _one_group(loop, draw, outcome)
                else:
                    outcome.case("bytes: " + read_as_everything(_bytes(draw)))
                    outcome.case("rank: " + rank_that_reads(_stream(draw)))
            except Exception as error:
                outcome.found(f"seed {seed * 1_000_003 + number}: {type(error).__name__}: {error}")
    finally:
        loop.close()
    outcome.extra = {"groups": groups}
    return outcome


def _one_group(loop: VirtualLoop, draw: Random, outcome: Outcome) -> None:
    bench = GroupBench(loop, draw.randint(1, 3))
    names, weights = zip(*_OPERATIONS, strict=True)
    is_honest = draw.random() < 0.3
    try:
        for _ in range(OPERATIONS_A_GROUP):
            operation = draw.choices(names, weights)[0]
            if is_honest and operation not in _HONEST:
                continue
            outcome.case(operation.__name__)
            operation(bench, draw)
            bench.check()
    finally:
        bench.end()


def submit(bench: GroupBench, draw: Random) -> None:
    bench.submit(draw.randint(0, 4))


def answer(bench: GroupBench, draw: Random) -> None:
    bench.answer(draw.randrange(bench.num_ranks))


def arrive(bench: GroupBench, draw: Random) -> None:
    bench.deliver(draw.randrange(bench.num_ranks), draw.choice((1, 3, 5, 20, 1000, 10_000)))


def all_answer(bench: GroupBench, draw: Random) -> None:
    for index in draw.sample(range(bench.num_ranks), bench.num_ranks):
        bench.answer(index)
        bench.deliver(index, 10_000)


def wrong_answer(bench: GroupBench, draw: Random) -> None:
    bench.wrong_answer(draw.randrange(bench.num_ranks), draw.choice(WRONG))


def junk(bench: GroupBench, draw: Random) -> None:
    payload = _bytes(draw)
    data = len(payload).to_bytes(4, "big") + payload if draw.random() < 0.7 else payload
    bench.say(draw.randrange(bench.num_ranks), data, is_fatal=False)


def flip(bench: GroupBench, draw: Random) -> None:
    bench.flip(draw.randrange(bench.num_ranks), draw.randrange(10_000))


def close(bench: GroupBench, draw: Random) -> None:
    bench.close(draw.randrange(bench.num_ranks), is_error=draw.random() < 0.5)


def note_failure_sign(bench: GroupBench, draw: Random) -> None:
    bench.note_failure_sign(draw.randrange(bench.num_ranks), certain=draw.random() < 0.5)


def fail(bench: GroupBench, draw: Random) -> None:
    bench.fail()


def cancel(bench: GroupBench, draw: Random) -> None:
    bench.cancel(draw.randrange(100))


def wait(bench: GroupBench, draw: Random) -> None:
    bench.wait(draw.choice((0.01, 0.1, 0.3)))


def silence(bench: GroupBench, draw: Random) -> None:
    bench.wait(1.5)


def stranger(bench: GroupBench, draw: Random) -> None:
    secret = bench.listener._secret
    hello = draw.choice(
        [Hello(EPOCH, 0, b"x" * 32), Hello(EPOCH, 0, secret), Hello(EPOCH - 1, 0, secret), Hello(EPOCH, 99, secret),
         Hello(EPOCH, -1, secret), Hello(EPOCH, 0, b"")]
    )  # fmt: skip
    bench.stranger(draw.choice([frame(hello), frame(hello)[:-1], _bytes(draw), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n"]))


_OPERATIONS: tuple[tuple[Callable[[GroupBench, Random], None], float], ...] = (
    (submit, 20), (answer, 16), (arrive, 24), (all_answer, 12), (cancel, 2), (wait, 4), (stranger, 2), (wrong_answer, 1.5),
    (junk, 1), (flip, 1.5), (close, 0.5), (note_failure_sign, 0.5), (fail, 0.3), (silence, 0.5),
)  # fmt: skip
_HONEST = (submit, answer, arrive, all_answer, cancel, wait, stranger, silence)


def _step(draw: Random, epoch: int, step: int) -> StepInput:
    slots = range(draw.randint(1, 3))
    return StepInput(
        epoch,
        step,
        [Row(slot, 0, 1 + draw.randint(0, 3), True) for slot in slots],
        [SlotInit(slot, [1, 2, 3], [slot], SamplingParams(seed=draw.randint(-(2**63), 2**63 - 1))) for slot in slots],
        [Grow(slot, 7) for slot in slots],
        [Draft(0, 3, [4, 5])],
    )


def _damaged(draw: Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(damaged) + 1)
        how = draw.randrange(4)
        if how == 0 and at < len(damaged):
            damaged[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            del damaged[at:]
        elif how == 2:
            damaged[at:at] = draw.randbytes(draw.randint(1, 6))
        elif at < len(damaged):
            damaged[at] = draw.choice((0xC0, 0xC1, 0xDD, 0xDF, 0xC6, 0xDB, 0xD3, 0xCF, 0x9F, 0x8F, 0xFF, 0xCB))
    return bytes(damaged)


def _bytes(draw: Random) -> bytes:
    """Bytes that resemble a message, random bytes, or deeply nested ones."""
    kind = draw.randrange(5)
    if kind < 2:
        return _damaged(draw, frame(_step(draw, EPOCH, 1))[4:])
    if kind == 2:
        return _damaged(draw, frame(Hello(EPOCH, 0, draw.randbytes(32)))[4:])
    if kind == 3:
        return draw.randbytes(draw.randint(0, 60))
    nested = draw.choice((b"\x91", b"\x81\xa1a", b"\xc7\x01\x05")) * draw.choice((5, 500, 5000, 60_000)) + b"\xc0"
    ack = b"\x96\xa3ack\x01\x02\x03\xcb" + b"\0" * 8
    return draw.choice((b"\x92\xa6answer", b"\x93\xa6answer\x80", ack, b"\x81\xa5other", b"")) + nested


def _stream(draw: Random) -> bytes:
    """Bytes for a rank to read: steps of its own epoch and of others, some damaged, and an end."""
    data = b""
    for step in range(draw.randint(0, 4)):
        whole = frame(_step(draw, draw.choice((EPOCH,) * 8 + (EPOCH - 1, EPOCH + 1)), step))
        if draw.random() < 0.3:
            payload = _damaged(draw, whole[4:])
            whole = len(payload).to_bytes(4, "big") + payload
        data += whole
    return _damaged(draw, data) if data and draw.random() < 0.2 else data


class _Runner:
    """Records every step that it starts."""

    def __init__(self) -> None:
        self.batches: list[StepInput] = []

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        self.batches.append(batch)
        return Pending.done(StepOutput(batch.epoch, batch.step, [0] * batch.num_samples))


def rank_that_reads(data: bytes) -> str:
    """A rank's side of the connection, without Ray. It answers each step of its epoch once, until the end or a WireError."""
    ours, theirs = socket.socketpair()
    runner, ended = _Runner(), "driver left"
    try:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        theirs.settimeout(60)
        try:
            StepExecutor(0, EPOCH, FrameSocket(theirs), runner).run()
        except WireError as error:
            ended = refused(error)
        theirs.setblocking(False)
        with suppress(BlockingIOError):
            # Unread bytes would reset the connection and discard the answers.
            while theirs.recv(2**16):
                pass
        theirs.close()
        answered = b""
        while piece := ours.recv(2**16):
            answered += piece
    finally:
        ours.close()
        theirs.close()
    assert all(batch.epoch == EPOCH for batch in runner.batches), "a step of another epoch was computed"
    num_answers = 0
    while answered:
        size = int.from_bytes(answered[:4], "big")
        msgspec.msgpack.decode(answered[4 : 4 + size])
        answered, num_answers = answered[4 + size :], num_answers + 1
    assert num_answers <= len(runner.batches)
    assert ended == "refused" or num_answers == len(runner.batches), "a step was not answered"
    return ended
