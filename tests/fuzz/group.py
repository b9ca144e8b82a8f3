"""Random late, repeated, damaged and missing answers, foreign connections and invalid bytes against a rank group."""

import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, cast

import msgspec

from cluster.rank.step_executor import StepExecutor
from cluster.wire.messages import FrameSocket, Hello, WireError, decode_hello, decode_reply, decode_step, frame
from cluster.wire.rank_runner import RankRunner
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Grow, Pending, Row, SlotInit, StepInput, StepOutput
from tests.fuzz.group_rules import EPOCH, GroupBench
from tests.fuzz.json_damage import damaged
from tests.fuzz.outcome import Outcome
from tests.support.virtual_loop import VirtualLoop

OPERATIONS_A_GROUP = 40


def _stranger(bench: GroupBench, draw: Random) -> None:
    hello = frame(Hello(EPOCH, 0, bench.listener._secret))
    bench.stranger(draw.choice([hello, hello[:-1], _bytes(draw), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n"]))


def _damage(bench: GroupBench, draw: Random) -> None:
    payload = _bytes(draw)
    junk = len(payload).to_bytes(4, "big") + payload if draw.random() < 0.7 else payload
    is_flipped = draw.random() < 0.6
    bench.damage(_one(bench, draw), lambda left: damaged(left, draw) if left and is_flipped else left + junk)


def _one(bench: GroupBench, draw: Random) -> int:
    return draw.randrange(bench.num_ranks)


Operation = Callable[[GroupBench, Random], Any]
HONEST: dict[str, tuple[Operation, float]] = {
    "submit": (lambda bench, draw: bench.submit(draw.randint(0, 4)), 20),
    "answer": (lambda bench, draw: bench.answer(_one(bench, draw)), 16),
    "arrive": (lambda bench, draw: bench.deliver(_one(bench, draw), draw.choice((1, 3, 5, 20, 1000, 10_000))), 24),
    "all answer": (lambda bench, draw: bench.all_answer(draw.sample(range(bench.num_ranks), bench.num_ranks)), 12),
    "cancel": (lambda bench, draw: bench.cancel(draw.randrange(100)), 2),
    "wait": (lambda bench, draw: bench.loop.wait(draw.choice((0.01, 0.1, 0.3))), 4),
    "silence": (lambda bench, draw: bench.loop.wait(1.5), 0.5),
    "stranger": (_stranger, 2),
}
OPERATIONS = HONEST | {
    "wrong answer": (lambda bench, draw: bench.wrong_answer(_one(bench, draw), draw), 1.5),
    "damage": (_damage, 2.5),
    "close": (lambda bench, draw: bench.close(_one(bench, draw), is_error=draw.random() < 0.5), 0.5),
    "sign": (lambda bench, draw: bench.note_failure_sign(_one(bench, draw), certain=draw.random() < 0.5), 0.5),
    "fail": (lambda bench, draw: bench.fail(), 0.3),
}


def run(cases: int, seed: int) -> Outcome:
    outcome, loop = Outcome("group"), VirtualLoop()
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
    bench, possible = GroupBench(loop, draw.randint(1, 3)), HONEST if draw.random() < 0.3 else OPERATIONS
    try:
        for _ in range(OPERATIONS_A_GROUP):
            (name,) = draw.choices(list(possible), [weight for _, weight in possible.values()])
            outcome.case(name)
            possible[name][0](bench, draw)
            bench.check()
    finally:
        bench.end()


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


def _bytes(draw: Random) -> bytes:
    """Bytes that resemble a message, random bytes, or deeply nested ones."""
    kind = draw.randrange(5)
    if kind < 2:
        return damaged(frame(_step(draw, EPOCH, 1))[4:], draw)
    if kind == 2:
        return damaged(frame(Hello(EPOCH, 0, draw.randbytes(32)))[4:], draw)
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
            payload = damaged(whole[4:], draw)
            whole = len(payload).to_bytes(4, "big") + payload
        data += whole
    return damaged(data, draw) if data and draw.random() < 0.2 else data


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
            StepExecutor(0, EPOCH, FrameSocket(theirs), cast(RankRunner, runner)).run()
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
