"""Sequences whose grammars may take long to compile: few have a slot before their first token, and others overtake the rest."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.fair_queue import WaitingQueue
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput

TOKEN = 5


def sequence(owner: str = "", *, is_slow: bool = False, priority: int = 0) -> Sequence:
    params = SamplingParams(grammar="g" if is_slow else "")
    return Sequence([3, 4], params, 12, owner, priority, is_slow_to_begin=is_slow)


class Served:
    """A scheduler of eight slots, for two of which a grammar may be compiled."""

    def __init__(self, *sequences: Sequence) -> None:
        self.scheduler = Scheduler(SchedulerConfig(8, 64, frozenset({2})), BlockPool(64, 4))
        for seq in sequences:
            self.scheduler.add(seq)

    def schedule(self) -> StepInput:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def commit(self, batch: StepInput, *deferred: Sequence) -> None:
        slots = {seq.slot for seq in deferred}
        late = [i for i, row in enumerate(batch.rows) if row.slot in slots]
        self.scheduler.commit(StepOutput(0, batch.step, [TOKEN] * len(batch.rows), deferred=late))


def test_few_have_a_slot_before_their_first_token() -> None:
    slow, quick = [sequence("a", is_slow=True) for _ in range(5)], [sequence("a") for _ in range(2)]
    served = Served(*slow, *quick)
    batch = served.schedule()
    assert [seq for seq in (*slow, *quick) if seq.slot is not None] == [*slow[:2], *quick]
    served.commit(batch, *slow[:2])
    batch = served.schedule()
    assert not batch.admit and served.scheduler.num_waiting == 3
    served.commit(batch, slow[0])  # the other has its first token
    served.commit(served.schedule(), slow[0], slow[2])
    assert [seq.slot is not None for seq in slow] == [True, True, True, False, False]
    served.scheduler.finish(slow[0], FinishReason.ABORT)
    served.schedule()
    assert [seq.slot is not None for seq in slow] == [False, True, True, True, False]


def test_those_whose_masks_take_long_count_until_they_end() -> None:
    slow = [sequence(is_slow=True) for _ in range(3)]
    for seq in slow:
        seq.is_slow = True
    served = Served(*slow)
    for _ in range(3):
        served.commit(served.schedule())
    assert [len(seq.output) for seq in slow] == [3, 3, 0]
    served.scheduler.finish(slow[0], FinishReason.STOP)
    served.schedule()
    assert slow[2].slot is not None


def test_one_has_a_slot_where_there_are_few() -> None:
    scheduler = Scheduler(SchedulerConfig(2, 64, frozenset({2})), BlockPool(64, 4))
    slow = [sequence(is_slow=True) for _ in range(2)]
    for seq in slow:
        scheduler.add(seq)
    assert scheduler.schedule() is not None
    assert [seq.slot is not None for seq in slow] == [True, False]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.booleans(), st.booleans()), max_size=40))
def test_the_next_quick_one_is_what_would_be_next_without_slow_ones(moves: list[tuple[str, int, bool, bool]]) -> None:
    queue, without = WaitingQueue(), WaitingQueue()
    for owner, priority, is_slow, also_take in moves:
        seq = sequence(owner, is_slow=is_slow, priority=priority)
        for each in (queue,) if is_slow else (queue, without):
            each.add(seq)
        assert queue.first() in set(queue)
        found = queue.first_quick()
        assert (found is None) == (not len(without))
        if found is not None and also_take:
            assert found.priority == without.first().priority
            of_owner = [one for one in without if (one.owner, one.priority) == (found.owner, found.priority)]
            assert of_owner[0] is found
            for each in (queue, without):
                each.remove(found)
                each.count_served(found, found.length)
        assert queue.first_quick() is None or queue.first_quick() in set(without)
    while len(queue):
        queue.remove(queue.first())
