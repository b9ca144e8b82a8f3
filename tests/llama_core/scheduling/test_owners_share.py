"""No owner keeps all slots or blocks while another waits; what that costs is bounded."""

from collections import Counter, deque
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepOutput
from tests.support.fake_ranks import EOS, FakeRanks, expected_output

BLOCK_SIZE = 4


class Served:
    """A scheduler over fake ranks, two steps in flight, and its sequences."""

    def __init__(self, slots: int, num_blocks: int = 10_000, window: int = 0) -> None:
        config = SchedulerConfig(slots, slots + 16, frozenset({EOS}), window=window)
        self.scheduler = Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))
        self.ranks = FakeRanks(BLOCK_SIZE, window=window)
        self.in_flight: deque[StepOutput] = deque()
        self.sequences: list[Sequence] = []

    def add(
        self, owner: str, count: int = 1, max_new: int = 1000, priority: int = 0, length: int = 6
    ) -> list[Sequence]:
        first = len(self.sequences)
        for seed in range(first, first + count):
            params = SamplingParams(seed=seed, ignore_eos=True)
            prompt = [3 + len(owner)] * length
            seq = Sequence(prompt, params, len(prompt) + max_new, terms=Terms(owner, priority))
            self.scheduler.add(seq)
            self.sequences.append(seq)
        return self.sequences[first:]

    def steps(self, count: int) -> None:
        for _ in range(count):
            while len(self.in_flight) < 2 and (batch := self.scheduler.schedule()) is not None:
                self.in_flight.append(self.ranks.step(batch))
            if self.in_flight:
                self.scheduler.commit(self.in_flight.popleft())

    def running(self) -> Counter[str]:
        return Counter(seq.terms.owner for seq in self.scheduler.live() if seq.slot is not None)


def is_done(sequences: Seq[Sequence]) -> bool:
    return all(seq.finished for seq in sequences)


@pytest.mark.parametrize("num_blocks", [10_000, 40], ids=["slots", "blocks"])
def test_a_short_request_ends_soon_beside_one_owner_s_128_choices(num_blocks: int) -> None:
    served = Served(slots=8, num_blocks=num_blocks)
    served.add("many", count=128, max_new=100)
    served.steps(60)
    assert served.running().keys() == {"many"}
    for _ in range(20):
        short = served.add("few", max_new=4)
        served.steps(10)
        assert is_done(short)


@given(
    slots=st.integers(1, 12),
    arrivals=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20)), min_size=1, max_size=8),
)
def test_waiting_owners_come_to_equal_shares_with_fewer_preemptions_than_slots(
    slots: int, arrivals: list[tuple[str, int]]
) -> None:
    served = Served(slots)
    for owner, count in arrivals:
        before = served.scheduler.num_preemptions
        served.add(owner, count)
        served.steps(3 * slots + 8)
        assert served.scheduler.num_preemptions - before < slots
        running = served.running()
        waiting = {seq.terms.owner for seq in served.scheduler.live() if seq.slot is None}
        assert all(max(running.values()) <= running[owner] + 1 for owner in waiting)
        assert sum(running.values()) == min(slots, len(served.sequences)), "a slot is free while a sequence waits"
    before = served.scheduler.num_preemptions
    served.steps(50)
    assert served.scheduler.num_preemptions == before, "shares that are reached stay"


def test_one_owner_alone_loses_nothing_whatever_its_priorities() -> None:
    served = Served(slots=4)
    for priority in (3, 0, 1):
        served.add("", count=20, max_new=30, priority=priority)
        served.steps(20)
    served.steps(1000)
    assert is_done(served.sequences) and served.scheduler.num_preemptions == 0


def test_no_sequence_makes_room_for_one_of_a_lower_priority() -> None:
    served = Served(slots=4)
    served.add("urgent", count=3)
    served.add("both", count=2, priority=1)
    served.steps(10)
    later = served.add("later", priority=2)
    served.steps(20)
    assert later[0].slot is None and served.scheduler.num_preemptions == 0
    equal = served.add("urgent too", priority=0)
    served.steps(5)
    assert equal[0].slot is not None and served.running() == {"urgent": 2, "both": 1, "urgent too": 1}


@pytest.mark.parametrize("window", [0, 9])
def test_preempted_sequences_end_with_their_own_tokens_beside_an_endless_stream_of_others(window: int) -> None:
    served = Served(slots=3, window=window, num_blocks=40)
    many = served.add("many", count=12, max_new=25)
    for _ in range(400):
        if is_done(many):
            break
        served.add("few", max_new=2)
        served.steps(6)
    assert is_done(many) and served.scheduler.num_preemptions > 12
    served.steps(2000)
    assert is_done(served.sequences) and served.scheduler.pool.num_used == 0
    assert all(seq.output == expected_output(seq) for seq in served.sequences)
