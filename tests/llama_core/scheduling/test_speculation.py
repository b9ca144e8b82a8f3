"""Drafts change the number of steps of a text and no token."""

import pytest

from llama_core.config import MAX_DRAFTS
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from tests.support.fake_ranks import EOS, FakeRanks, Oracle, expected_output, run_to_end

BLOCK_SIZE = 4


def make(max_drafts: int = MAX_DRAFTS, slots: int = 4, num_blocks: int = 400, budget: int = 64) -> Scheduler:
    config = SchedulerConfig(slots, budget, frozenset({EOS}), max_drafts=max_drafts)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))


def sequence(prompt: list[int], max_new: int, **params: object) -> Sequence:
    return Sequence(prompt, SamplingParams(**params), len(prompt) + max_new)  # type: ignore[arg-type]


def looping(tokens: list[int], seed: int = 0) -> int:
    return 3 + (tokens[-1] - 2) % 11


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps(depth: int) -> None:
    scheduler = make()
    seq = sequence([3, 4, 5], 200)
    steps = run_to_end(scheduler, FakeRanks(BLOCK_SIZE, looping), [seq], depth)
    assert seq.output == expected_output(seq, looping)
    assert steps < 60, "11 to learn the loop, a few to trust it, then eight tokens a step"
    assert scheduler.num_drafts_accepted > 0.9 * scheduler.num_drafts


@pytest.mark.parametrize(("num_rows", "most"), [(1, 7), (2, 4), (3, 2), (4, 2), (5, 0), (30, 0)])
def test_running_sequences_share_the_drafts_and_beyond_four_there_are_none(num_rows: int, most: int) -> None:
    scheduler, ranks = make(slots=32, num_blocks=2000), FakeRanks(BLOCK_SIZE, looping)
    sequences = [sequence([3 + i % 5, 4, 5], 50) for i in range(num_rows)]
    for seq in sequences:
        seq.drafting = Oracle(looping, 0)
        scheduler.add(seq)
    largest = 0
    for _ in range(6):
        batch = scheduler.schedule()
        assert batch is not None
        largest = max(largest, *(row.num_drafts for row in batch.rows))
        scheduler.commit(ranks.step(batch))
    assert largest == most
    if not most:
        assert scheduler.num_drafts == 0


def test_blocks_for_drafts_are_taken_from_no_other_sequence() -> None:
    scheduler, ranks = make(num_blocks=6, slots=2), FakeRanks(BLOCK_SIZE, looping)
    first, second = sequence([3, 4, 5], 8), sequence([7, 8], 8)
    for seq in (first, second):
        seq.drafting = Oracle(looping, 0)
    run_to_end(scheduler, ranks, [first, second], 2)
    assert scheduler.num_preemptions == 0, "both fit unless drafts take blocks of the other"
    assert first.output == expected_output(first, looping) and second.output == expected_output(second, looping)
