"""Steps over real sockets to simulated ranks: order, epochs, deadlines, and the named rank. No Ray."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from cluster.driver import fan_out
from cluster.driver.fan_out import FanOut
from cluster.wire.messages import Ack, Answer, Fault, FrameSocket, decode_step
from cluster.wire.transport import RankListener, connect
from llama_core.errors import RankFailure
from llama_core.scheduling.step import Row, StepInput, StepOutput
from tests.support.waiting import until_true

EPOCH = 3


def step_input(step: int, epoch: int = EPOCH) -> StepInput:
    return StepInput(epoch, step, [Row(0, step, 1, True)])


def answer(step: int, epoch: int = EPOCH) -> Answer:
    return Answer(StepOutput(epoch, step, [step]))


@dataclass
class Bench:
    """A fan-out to two ranks, and the ranks' ends of its connections."""

    fan_out: FanOut
    ranks: list[FrameSocket]
    failures: list[RankFailure]
    failed: asyncio.Event
    overdue: list[tuple[list[int], float]]

    async def run(self, num_steps: int, seconds: float = 0.0) -> None:
        """Steps 0, 1, ... of one token each, answered by both ranks after these times."""
        for step in range(num_steps):
            result = self.fan_out.submit(step_input(step))
            await asyncio.sleep(seconds)
            self.reply(1, Ack(EPOCH, step, 1))
            self.reply(0, answer(step))
            await result

    def reply(self, rank: int, message: Answer | Ack | Fault) -> None:
        self.ranks[rank].send(message)

    async def receive(self, rank: int) -> StepInput:
        payload = await asyncio.to_thread(self.ranks[rank].receive)
        assert payload is not None
        return decode_step(payload)

    async def failure(self) -> RankFailure:
        await asyncio.wait_for(self.failed.wait(), 120)
        return self.failures[0]


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    listener = RankListener(EPOCH, 2, None)
    invitation = await listener.open()
    ranks = [await asyncio.to_thread(connect, invitation, rank, 60) for rank in range(2)]
    failures: list[RankFailure] = []
    failed = asyncio.Event()
    overdue: list[tuple[list[int], float]] = []

    def on_failure(failure: RankFailure) -> None:
        failures.append(failure)
        failed.set()

    connections = await listener.connections()
    fan_out = FanOut(
        connections,
        epoch=EPOCH,
        step_timeout_s=getattr(request, "param", 0.3),
        on_failure=on_failure,
        on_overdue=lambda silent, waited_s: overdue.append((silent, waited_s)),
    )
    yield Bench(fan_out, ranks, failures, failed, overdue)
    fan_out.fail(RankFailure("end of the test"))
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, answer(0, epoch=EPOCH - 1)),
        (1, Ack(EPOCH - 1, 0, 1)),
        (0, answer(1)),
        (1, Ack(EPOCH, 5, 1)),
        (1, Ack(EPOCH, 0, 0)),
        (0, Ack(EPOCH, 0, 0)),
        (1, answer(0)),
    ],
    ids=["old answer", "old ack", "later step", "later ack", "as rank 0", "rank 0 without result", "rank 1 with one"],
)
async def test_an_answer_that_is_not_due_is_refused(bench: Bench, rank: int, message: Answer | Ack) -> None:
    result = bench.fan_out.submit(step_input(0))
    bench.reply(rank, message)
    with pytest.raises(RankFailure, match="was due"):
        await asyncio.wait_for(result, 120)
    assert (await bench.failure()).rank == rank


async def test_a_death_is_reported_instead_of_the_collective_error_that_it_causes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "_SECOND_SIGN_S", 60)
    bench.reply(0, Fault(EPOCH, 0, "RuntimeError", "gloo: connection closed by peer", collective=True))
    bench.ranks[0].close()
    await asyncio.sleep(0.02)
    bench.ranks[1].close()
    failure = await bench.failure()
    assert failure.rank == 1
    assert "died" in failure.message


async def test_a_collective_error_alone_ends_the_group_after_a_delay(bench: Bench) -> None:
    bench.reply(0, Fault(EPOCH, 0, "RuntimeError", "gloo: timeout", collective=True))
    assert (await bench.failure()).message == "rank 0 failed: RuntimeError: gloo: timeout"


@pytest.mark.parametrize("bench", [3.0], indirect=True)
async def test_a_steps_deadline_begins_with_its_turn(bench: Bench) -> None:
    for step in range(3):
        bench.fan_out.submit(step_input(step))
    for step in range(3):
        await asyncio.sleep(1.2)  # 3.6 s in all, each within the 3 s of its turn
        bench.reply(0, answer(step))
        bench.reply(1, Ack(EPOCH, step, 1))
    await asyncio.sleep(3.1)
    assert not bench.overdue
    assert not bench.failures


@pytest.mark.parametrize("bench", [60.0], indirect=True)
async def test_the_deadline_is_learned_from_the_steps_durations(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "_SHORTEST_DEADLINE_S", 0.2)
    monkeypatch.setattr(fan_out, "_TIMES_LONGEST", 2.0)
    monkeypatch.setattr(fan_out, "_CHECK_PERIOD_S", 0.05)
    await bench.run(fan_out._ENOUGH_STEPS, 0.001)
    bench.fan_out.submit(step_input(99))
    await until_true("the step is overdue", lambda: bench.overdue)
    ((silent, waited_s),) = bench.overdue
    assert silent == [0, 1] and 0.2 <= waited_s < 20


@pytest.mark.parametrize("bench", [1.0], indirect=True)
async def test_a_driver_that_stood_still_itself_names_no_rank(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "_LATE_S", 0.2)
    result = bench.fan_out.submit(step_input(0))
    time.sleep(2.0)  # noqa: ASYNC251 (as when the process is stopped)
    await asyncio.sleep(0.1)
    assert not bench.overdue
    bench.reply(1, Ack(EPOCH, 0, 1))
    bench.reply(0, answer(0))
    assert (await result).tokens == [0]
