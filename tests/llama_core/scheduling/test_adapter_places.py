"""Which sequences run beside which adapters, where the ranks hold few, and what they are told to load."""

import pytest

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason, Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import AdapterLoad, StepInput
from tests.support.fake_ranks import EOS, FakeRanks, expected_output

SLOTS = 8


class Places:
    """A scheduler whose ranks have two places, and the adapters that they would hold. begun: adapters and owners of sequences
    that run at the beginning."""

    def __init__(self, *begun: tuple[str, str], slots: int = SLOTS) -> None:
        self.scheduler = Scheduler(SchedulerConfig(slots, 64, frozenset({EOS}), max_loras=2), BlockPool(64, 4))
        self.scheduler.adapter_places.folders |= {name: f"/{name}" for name in "abcd"}
        self.ranks = FakeRanks(4)
        self.loaded: list[AdapterLoad] = []
        self.begun = [self.add(adapter, owner) for adapter, owner in begun]
        for _ in begun:
            self.step()

    def add(self, adapter: str, owner: str = "", priority: int = 0) -> Sequence:
        seq = Sequence([3, 4, 5], SamplingParams(ignore_eos=True), 40, Terms(owner, priority, adapter=adapter))
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepInput:
        batch = self.scheduler.schedule()
        assert batch is not None
        self.loaded = batch.adapters
        self.scheduler.commit(self.ranks.step(batch))
        return batch


BOTH = ("a", ""), ("b", "")


def test_a_sequence_waits_until_no_running_one_needs_a_place() -> None:
    places = Places()
    first, second, third = (places.add(adapter) for adapter in ("a", "b", "c"))
    for place, adapter in ((1, "a"), (2, "b")):
        places.step()
        assert places.loaded == [AdapterLoad(place, adapter, f"/{adapter}")], "one a step, for which all streams wait"
    assert third.slot is None
    places.scheduler.finish(second, FinishReason.ABORT)
    batch = places.step()
    assert places.loaded == [AdapterLoad(2, "c", "/c")]
    assert {init.slot: init.adapter_place for init in batch.admit} == {third.slot: 2}
    assert first.slot is not None


def test_a_sequence_without_a_place_is_overtaken_by_a_bounded_number() -> None:
    places = Places(*BOTH)
    first, second = places.begun
    third = places.add("c")
    for _ in range(SLOTS):
        seq = places.add("a")
        places.step()
        assert seq.slot is not None and third.slot is None
        places.scheduler.finish(seq, FinishReason.ABORT)
    late, base = places.add("b"), places.add("")
    places.step()
    assert base.slot is not None and late.slot is None and third.slot is None
    places.scheduler.finish(first, FinishReason.ABORT)
    places.step()
    assert places.loaded == [AdapterLoad(1, "c", "/c")]
    places.step()
    assert second.slot is not None and late.slot is not None and third.slot is not None


@pytest.mark.parametrize(
    "steady",
    [[("", "ann"), ("a", "bob"), ("b", "bob")], [("a", "ann"), ("b", "ann")], [("a", "ann"), ("b", "bob")]],
)
def test_no_stream_of_others_starves_a_sequence_that_lacks_a_place(steady: list[tuple[str, str]]) -> None:
    places = Places(("a", "bob"), ("b", "bob"), slots=4)
    wanted = [places.add("c", "ann"), places.add("d", "bob")]
    for _ in range(60):
        for adapter, owner in steady:
            places.add(adapter, owner)
        places.step()
        oldest = min(places.scheduler.live(), key=lambda seq: (seq.slot is None, -seq.length))
        places.scheduler.finish(oldest, FinishReason.ABORT)
    assert all(seq.finished or seq.slot is not None for seq in wanted)


def test_other_adapters_overtake_by_priority() -> None:
    places = Places(*BOTH)
    first, late = places.add("c", priority=1), places.add("b", priority=2)
    for _ in range(SLOTS):
        peer = places.add("b", priority=1)
        places.step()
        assert peer.slot is not None and late.slot is None and first.slot is None
        places.scheduler.finish(peer, FinishReason.ABORT)
    early = places.add("b")
    places.step()
    assert early.slot is not None and late.slot is None and first.slot is None


def test_an_adapter_whose_sequence_ended_with_an_error_is_loaded_again() -> None:
    places = Places()
    for adapter, reason in (("a", FinishReason.ABORT), ("b", FinishReason.ERROR), ("b", FinishReason.ABORT)):
        seq = places.add(adapter)
        places.step()
        places.scheduler.finish(seq, reason)
    assert places.loaded == [AdapterLoad(2, "b", "/b")]
    places.add("a")
    places.step()
    assert places.loaded == []


def test_the_adapter_used_longest_ago_is_replaced() -> None:
    places = Places()
    for adapter in ("a", "b", "a"):
        seq = places.add(adapter)
        places.step()
        places.scheduler.finish(seq, FinishReason.ABORT)
    assert places.loaded == []
    places.add("c")
    places.step()
    assert places.loaded == [AdapterLoad(2, "c", "/c")]


def running(places: Places) -> list[Sequence]:
    return [seq for seq in places.scheduler.live() if seq.slot is not None]


@pytest.mark.parametrize("rival", [None, "d"], ids=["", "beside a sequence that waits for a place itself"])
def test_an_owner_of_all_places_gives_one_up(rival: str | None) -> None:
    places = Places(*((adapter, "many") for adapter in "ab" * 3), slots=16)
    many = places.begun
    if rival:
        places.add(rival, "many")
        places.step()
    few = places.add("c", "few")
    places.step()
    assert few.slot is not None and places.loaded == [AdapterLoad(2, "c", "/c")]
    assert running(places) == [*many[::2], few], "the adapter of the owner's oldest sequence keeps its place"
    for _ in range(3):
        places.step()
    assert [seq.terms.adapter for seq in running(places)] == ["a", "a", "a", "c"], "shares that are reached stay"
    places.add("d", "few")
    places.step()
    assert places.scheduler.num_preemptions == 3, "each has one"
    places.scheduler.finish(few, FinishReason.ABORT)
    while not all(seq.finished for seq in many):
        places.step()
    assert all(seq.output == expected_output(seq) for seq in many)


def test_no_place_is_given_up_to_a_lower_priority() -> None:
    places = Places(("a", "many"), ("b", "many"))
    late, urgent = places.add("c", "few", priority=1), places.add("d", "fewer", priority=0)
    places.step()
    assert late.slot is None and urgent.slot is not None
