"""What a fan-out learns and whom it blames, on a virtual clock. `tests/fuzz/group.py` has random operations."""

from collections.abc import Callable, Iterator

import pytest

from cluster.driver import fan_out
from cluster.wire.messages import Ack, Answer, Fault
from llama_core.scheduling.step import StepOutput
from tests.fuzz.group_rules import EPOCH, GroupBench
from tests.support.virtual_loop import VirtualLoop


@pytest.fixture
def new_bench() -> Iterator[Callable[[float], GroupBench]]:
    """new_bench(step_timeout_s): of two ranks."""
    loop = VirtualLoop()
    yield lambda step_timeout_s: GroupBench(loop, 2, step_timeout_s)
    loop.close()


def collective(message: str) -> Fault:
    return Fault(EPOCH, 0, "RuntimeError", message, collective=True)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, Answer(StepOutput(EPOCH - 1, 0, [0]))), (1, Ack(EPOCH, 0, 0)), (1, Answer(StepOutput(EPOCH, 0, [0])))],
    ids=["old answer", "as rank 0", "rank 1 with a result"],
)
def test_an_answer_that_is_not_due_is_refused_and_its_rank_named(
    new_bench: Callable[[float], GroupBench], rank: int, message: Answer | Ack
) -> None:
    bench = new_bench(60.0)
    bench.submit()
    bench.say(rank, message)
    bench.deliver(rank, 1000)
    (failure,) = bench.failures
    assert failure.rank == rank and "was due" in failure.message


def test_a_death_is_reported_instead_of_the_collective_error_that_it_causes(
    new_bench: Callable[[float], GroupBench],
) -> None:
    alone, bench = new_bench(60.0), new_bench(60.0)
    for each in (alone, bench):
        each.say(0, collective("gloo: closed by peer"))
        each.deliver(0, 1000)
    bench.loop.wait(0.1)
    bench.close(1)
    assert bench.failures[0].rank == 1 and "died" in bench.failures[0].message
    alone.loop.wait(0.15)
    (failure,) = alone.failures
    assert failure.message == "rank 0 failed: RuntimeError: gloo: closed by peer" and not failure.raised


def test_a_steps_deadline_begins_with_its_turn_and_a_driver_that_stood_still_itself_names_no_rank(
    new_bench: Callable[[float], GroupBench],
) -> None:
    bench = new_bench(3.0)
    for _ in range(4):
        bench.submit()
    for _ in range(3):
        bench.loop.wait(2.4)  # each within the time of its turn
        bench.all_answer()
    bench.loop._now_s += 4.0
    bench.loop.wait(0.1)
    assert not bench.overdue
    bench.loop.wait(3.0)
    assert bench.overdue == [([0, 1], 3.0)]


def test_the_deadline_is_learned_from_the_steps_durations(new_bench: Callable[[float], GroupBench]) -> None:
    bench = new_bench(60.0)
    for _ in range(fan_out._ENOUGH_STEPS):
        bench.submit()
        bench.loop.wait(0.6)
        bench.all_answer()
    bench.submit()
    bench.loop.wait(11.9)
    assert not bench.overdue
    bench.loop.wait(0.2)
    ((silent, waited_s),) = bench.overdue
    assert silent == [0, 1] and waited_s == pytest.approx(12.0)
