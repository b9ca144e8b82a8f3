"""The next request: fair between owners by their virtual token counters, in order within an owner, without starvation."""

import time
from collections import Counter

from llama_core.scheduling import fair_queue
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import Sequence, Terms
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


def test_the_last_requests_of_the_largest_owner_give_way_to_a_very_long_one_and_are_found_in_little_time() -> None:
    config = SchedulerConfig(1, 64, frozenset({2}), max_waiting=1500, max_waiting_tokens=6000)
    scheduler = Scheduler(config, BlockPool(64, 16))
    flood = [seq("flood", length=4) for _ in range(1500)]
    for one in flood:
        scheduler.add(one)
    begin_s = time.thread_time()
    assert scheduler.admission.victims([4000], "new") == flood[:-1000:-1]
    assert time.thread_time() - begin_s < 2.5


def test_a_request_gives_way_although_its_owners_first_one_waits_for_an_adapters_place() -> None:
    queue = WaitingQueue()
    first, last = seq("flood"), seq("flood")
    queue.add(first)
    queue.add(last)
    queue.remove(first)
    queue.add_first(first)
    for by_tokens in (False, True):
        assert queue.last_of_largest("new", 1, (), by_tokens=by_tokens) == [last]


def test_no_request_gives_way_to_an_owner_that_has_as_many_with_one_that_waits_for_an_adapters_place() -> None:
    queue = WaitingQueue()
    queue.add_first(seq("new"))
    for _ in range(2):
        queue.add(seq("other"))
    assert queue.last_of_largest("new", 1, (), by_tokens=False) == []
    assert queue.last_of_largest("new", seq("new").length, (), by_tokens=True) == []


def test_an_owner_whose_requests_have_all_begun_does_not_keep_others_from_giving_way() -> None:
    """Found by the simulation at seed 203472: many waited that another engine had begun."""
    queue = WaitingQueue()
    begun, flood = [seq("begun") for _ in range(5)], [seq("flood") for _ in range(3)]
    for one in (*begun, *flood):
        queue.add(one)
    for one in begun:
        one.progress.has_begun = True
    assert queue.last_of_largest("new", 1, (), by_tokens=False) == [flood[-1]]
