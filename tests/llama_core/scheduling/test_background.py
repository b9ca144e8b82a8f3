"""Background requests run only while there are no others, hold nothing from them, and lose no token."""

import pytest

from llama_core.errors import QueueFull, RankFailure
from llama_core.scheduling.request import BACKGROUND, Sequence
from tests.llama_core.scheduling.test_owners_share import Served, is_done
from tests.support.fake_ranks import expected_output


def run(served: Served) -> set[int]:
    """The priorities of the sequences that have a slot."""
    return {seq.terms.priority for seq in served.scheduler.live() if seq.slot is not None}


@pytest.mark.parametrize("owner", ["batch", "live"], ids=["another owner", "the same owner"])
def test_a_request_is_in_the_next_step_alone_while_background_ones_hold_every_slot_and_block(owner: str) -> None:
    served = Served(slots=4, num_blocks=20)
    background = served.add(owner, count=8, max_new=9, priority=BACKGROUND)
    served.steps(4)
    assert run(served) == {BACKGROUND} and not served.scheduler.admission.free_slots
    live = served.add("live", count=2, max_new=20)
    step = served.scheduler.schedule()
    assert step is not None and len(step.admit) == len(step.rows) == 2
    assert all(seq.slot is not None for seq in live)
    served.in_flight.append(served.ranks.step(step))
    while not is_done(live):
        served.steps(1)
        assert run(served) <= {0}
    served.steps(100)
    assert is_done(background) and served.scheduler.pool.num_used == 0
    assert all(seq.output == expected_output(seq) for seq in served.sequences)


def test_background_requests_that_lost_their_ranks_stay_behind_others() -> None:
    served = Served(slots=2)
    background = served.add("batch", count=3, max_new=9, priority=BACKGROUND)
    served.steps(3)
    begun = [seq for seq in background if seq.slot is not None]
    served.add("live", count=3, max_new=5)
    served.scheduler.restart(1, RankFailure("a rank failed"))
    served.in_flight.clear()
    served.ranks = type(served.ranks)(4)
    order: list[Sequence] = []
    while served.scheduler.has_work:
        served.steps(1)
        order += [seq for seq in served.sequences if seq.finished and seq not in order]
    assert [seq.terms.priority for seq in order] == [0] * 3 + [BACKGROUND] * 3
    assert set(order[3:5]) == set(begun), "those that had begun come before the others of their owner"
    assert all(seq.output == expected_output(seq) for seq in served.sequences)


def test_whether_all_live_requests_are_background_ones() -> None:
    served = Served(slots=1)
    assert not served.scheduler.is_background, "nothing is live"
    served.add("batch", count=2, max_new=9, priority=BACKGROUND)
    served.steps(1)
    assert served.scheduler.is_background and served.scheduler.admits_newcomers
    served.add("live", max_new=2)
    assert not served.scheduler.is_background and not served.scheduler.admits_newcomers
    served.steps(1)
    assert not served.scheduler.is_background


def test_background_requests_take_no_room_of_the_queue_from_others() -> None:
    served = Served(slots=2)
    served.scheduler.admission.limit(1, None)
    for _ in range(3):
        served.scheduler.make_room([6], "batch", is_background=True)
        served.add("batch", priority=BACKGROUND)
    with pytest.raises(QueueFull):
        served.scheduler.make_room([6], "batch", is_background=True)
    served.steps(1)
    for _ in range(3):
        assert served.scheduler.make_room([6], "live") == []
        served.add("live")
    with pytest.raises(QueueFull):
        served.scheduler.make_room([6], "live")
    assert (served.scheduler.num_waiting, served.scheduler.num_background_waiting) == (6, 3)
