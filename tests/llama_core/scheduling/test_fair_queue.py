"""The next request: fair between owners by their virtual token counters, in order within an owner, without starvation."""

import time
from collections import Counter
from contextlib import suppress

import pytest

from llama_core.errors import QueueFull
from llama_core.scheduling import fair_queue
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import FinishReason, Request, Sequence, Terms, sequences_of
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig


def seq(owner: str = "", priority: int = 0, length: int = 10) -> Sequence:
    return Sequence([3] * length, SamplingParams(), length + 10, terms=Terms(owner, priority))


def take(queue: WaitingQueue, cost: float | None = None) -> Sequence:
    first = queue.first({})
    queue.remove(first)
    queue.count_served(first, first.length if cost is None else cost)
    return first


def test_one_owner_leaves_a_share_of_the_queue_to_other_owners() -> None:
    queue = WaitingQueue()

    def fill(owner: str, most: int = 100) -> int:
        before = len(queue)
        while (free := most - len(queue)) and queue.has_capacity(owner, free, None):
            queue.add(seq(owner))
        return len(queue) - before

    assert fill("alone", 10) == 10, "all of it, while no other owner is known"
    for one in list(queue):
        queue.remove(one)
    assert fill("greedy") == 80, "other owners are known"
    assert fill("modest") == 16 and queue.has_capacity("another", 4, None) and queue.has_capacity("", 4, None)
    assert not queue.has_capacity("greedy", None, 10) and queue.has_capacity("greedy", None, 1000)


def test_owners_get_the_same_number_of_tokens_not_of_requests() -> None:
    queue = WaitingQueue()
    for _ in range(200):
        queue.add(seq("long", length=40))
        queue.add(seq("short", length=10))
    given: Counter[str] = Counter()
    for _ in range(100):
        one = take(queue)
        given[one.terms.owner] += one.length
    assert abs(given["long"] - given["short"]) <= 40


def test_tokens_of_running_requests_count_too() -> None:
    queue = WaitingQueue()
    for owner in ("a", "b") * 3:
        queue.add(seq(owner))
    assert take(queue).terms.owner == "a"
    queue.count_served(seq("b"), 1000)  # tokens that running requests of b generate meanwhile
    assert [take(queue).terms.owner for _ in range(2)] == ["a", "a"]


def test_an_absent_owner_gains_no_service() -> None:
    queue = WaitingQueue()
    queue.add(seq("new"))
    take(queue)
    for _ in range(100):
        queue.add(seq("old"))
    for _ in range(50):
        take(queue)
    for _ in range(50):
        queue.add(seq("new"))
    assert Counter(take(queue).terms.owner for _ in range(20)) == {"old": 10, "new": 10}


def test_the_number_of_counters_is_bounded() -> None:
    queue = WaitingQueue()
    for number in range(3 * fair_queue.MAX_IDLE_OWNERS):
        queue.add(seq(str(number), priority=number % 3))
        take(queue)
    assert sum(len(part.counters) for part in queue._classes.values()) <= fair_queue.MAX_IDLE_OWNERS + 1


def test_service_at_another_priority_does_not_delay_a_newcomer() -> None:
    """With one counter for all priorities, the owner that always waits was served 2,000 times before the newcomer."""
    queue = WaitingQueue()
    for _ in range(2):
        queue.add(seq("always", priority=10))
    for _ in range(2000):
        queue.add(seq("other", priority=0))
        take(queue)
    queue.add(seq("newcomer", priority=10))
    served: list[str] = []
    while not served or served[-1] != "newcomer":
        served.append(take(queue).terms.owner)
        queue.add(seq("always", priority=10))
    assert len(served) <= 2


class Full:
    """A scheduler with one slot and room for four that wait."""

    def __init__(self, **limits: int) -> None:
        config = SchedulerConfig(1, 64, frozenset({2}), **(limits or {"max_waiting": 4}))  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, BlockPool(64, 16))

    def add(self, owner: str, n: int = 1, length: int = 4) -> list[Sequence]:
        """A request of n choices. Returns those that give way to it."""
        request = Request([[3] * length], [SamplingParams(max_tokens=20)], n=n, terms=Terms(owner))
        sequences = sequences_of(request, 100, 100)
        victims = self.scheduler.make_room([seq.length for seq in sequences], owner)
        for one in sequences:
            self.scheduler.add(one)
        return victims

    def fill(self, owner: str, **request: int) -> list[Sequence]:
        """Requests until one is refused. Returns those that wait."""
        with suppress(QueueFull):
            while True:
                assert self.add(owner, **request) == []
                self.scheduler.schedule()
        return list(self.scheduler.admission.waiting)


@pytest.mark.parametrize("limits", [{"max_waiting": 4}, {"max_waiting_tokens": 16}])
def test_the_last_request_of_the_largest_owner_gives_way_to_a_newcomer(limits: dict[str, int]) -> None:
    full = Full(**limits)
    waiting = full.fill("flood")
    assert len(waiting) == 4, "the only owner that is known has the whole queue"
    full.scheduler.check_capacity([4], "new")
    assert all(not one.finished for one in waiting), "a check ends nothing"
    (victim,) = full.add("new")
    assert victim is waiting[-1]
    assert victim.finish_reason is FinishReason.ERROR and isinstance(victim.error, QueueFull)
    assert full.scheduler.num_waiting == 4
    with pytest.raises(QueueFull):
        full.add("flood")
    assert [one.terms.owner for name in ("newer", "newest") for one in full.add(name)] == ["flood"] * 2, (
        "then each has one"
    )
    with pytest.raises(QueueFull):
        full.add("last")


def test_requests_that_give_way_to_a_very_long_one_are_found_in_little_time() -> None:
    full = Full(max_waiting=1500, max_waiting_tokens=6000)
    for _ in range(1500):
        full.scheduler.add(seq("flood", length=4))
    begin_s = time.thread_time()
    assert len(full.scheduler.admission.victims([4000], "new")) == 999
    assert time.thread_time() - begin_s < 2.5
