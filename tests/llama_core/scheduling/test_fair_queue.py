"""Who is next: fair between owners by what they were given, in order within one, and nobody waits for ever."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from llama_core.scheduling import fair_queue as waiting
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams


def seq(owner: str = "", priority: int = 0, length: int = 10) -> Sequence:
    return Sequence([3] * length, SamplingParams(), length + 10, owner=owner, priority=priority)


def take(queue: WaitingQueue, cost: float | None = None) -> Sequence:
    first = queue.first()
    queue.remove(first)
    queue.charge(first.owner, first.length if cost is None else cost)
    return first


def test_one_owner_is_served_in_order() -> None:
    queue, all_ = WaitingQueue(), [seq() for _ in range(5)]
    for one in all_:
        queue.add(one)
    assert len(queue) == 5 and queue.num_tokens == 50 and list(queue) == all_
    assert [take(queue) for _ in range(5)] == all_
    assert len(queue) == queue.num_tokens == 0


def test_an_owner_leaves_room_for_others_where_there_are_any() -> None:
    queue = WaitingQueue()

    def fill(owner: str, most: int = 100) -> int:
        before = len(queue)
        while (room := most - len(queue)) and queue.may_add(owner, room, None):
            queue.add(seq(owner))
        return len(queue) - before

    assert fill("alone", 10) == 10, "all of it, while nobody else is known"
    for one in list(queue):
        queue.remove(one)
    assert fill("greedy") == 80
    assert fill("modest") == 16 and queue.may_add("another", 4, None) and queue.may_add("", 4, None)
    assert not queue.may_add("greedy", None, 10) and queue.may_add("greedy", None, 1000)


def test_who_ran_already_takes_no_room_for_tokens() -> None:
    queue = WaitingQueue()
    waits, ran = seq(length=7), seq(length=50)
    queue.add(waits)
    queue.add_first(ran)
    assert len(queue) == 2 and queue.num_tokens == 7 and queue.first() is ran
    queue.remove(ran)
    queue.remove(waits)
    assert len(queue) == 0 and queue.num_tokens == 0


def test_an_owner_with_a_thousand_requests_does_not_keep_another_waiting() -> None:
    queue = WaitingQueue()
    for _ in range(1000):
        queue.add(seq("greedy"))
    for _ in range(10):
        take(queue)
    modest = [seq("modest") for _ in range(3)]
    for one in modest:
        queue.add(one)
    taken = [take(queue) for _ in range(7)]
    assert [one for one in taken if one.owner == "modest"] == modest


def test_owners_get_the_same_number_of_tokens_not_of_requests() -> None:
    queue = WaitingQueue()
    for _ in range(200):
        queue.add(seq("long", length=40))
        queue.add(seq("short", length=10))
    given: Counter[str] = Counter()
    for _ in range(100):
        one = take(queue)
        given[one.owner] += one.length
    assert abs(given["long"] - given["short"]) <= 40


def test_what_runs_on_counts_too() -> None:
    queue = WaitingQueue()
    for owner in ("a", "b") * 3:
        queue.add(seq(owner))
    assert take(queue).owner == "a"
    queue.charge("b", 1000)  # what earlier ones of b generate meanwhile
    assert [take(queue).owner for _ in range(2)] == ["a", "a"]


def test_nobody_saves_up_while_away() -> None:
    queue = WaitingQueue()
    queue.add(seq("new"))
    take(queue)
    for _ in range(100):
        queue.add(seq("old"))
    for _ in range(50):
        take(queue)
    for _ in range(50):
        queue.add(seq("new"))
    assert Counter(take(queue).owner for _ in range(20)) == {"old": 10, "new": 10}


def test_a_lower_number_comes_first_and_who_was_sent_back_before_all() -> None:
    queue = WaitingQueue()
    late, soon, back, earlier = seq(priority=5), seq(priority=0), seq(priority=9), seq(priority=9)
    for one in (late, soon):
        queue.add(one)
    queue.add_first(back)
    queue.add_first(earlier)
    assert [take(queue) for _ in range(4)] == [earlier, back, soon, late]


def test_what_is_remembered_of_owners_is_bounded(monkeypatch: object) -> None:
    queue = WaitingQueue()
    for number in range(3 * waiting.MOST_OWNERS):
        queue.add(seq(str(number)))
        take(queue)
    assert len(queue._given) <= waiting.MOST_OWNERS + 1


def test_an_owner_that_comes_and_goes_leaves_nothing_behind() -> None:
    queue = WaitingQueue()
    stays = seq("stays")
    queue.add(stays)
    for _ in range(1000):
        one = seq("goes")
        queue.add(one)
        queue.remove(one)
    assert len(queue._lines[0].heap) <= 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.integers(1, 50), st.booleans()), max_size=60))
def test_everyone_is_served_once_in_any_mix(moves: list[tuple[str, int, int, bool]]) -> None:
    queue, left = WaitingQueue(), set[Sequence]()
    for owner, priority, length, also_take in moves:
        one = seq(owner, priority, length)
        queue.add(one)
        left.add(one)
        if also_take:
            left.remove(take(queue))
        assert set(queue) == left and len(queue) == len(left)
        assert queue.num_tokens == sum(one.length for one in left)
    while len(queue):
        first = queue.first()
        assert first.priority == min(one.priority for one in left)
        mine = [one for one in queue if one.owner == first.owner and one.priority == first.priority]
        assert mine[0] is first
        left.remove(take(queue))
    assert not left
