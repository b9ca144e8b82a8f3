"""The scheduler's choices. `tests/fuzz/test_scheduler.py` has its rules under random operations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prompt_budget import TOKENS_A_PROMPT, TOKENS_ALONE
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.sliding_window import SlidingWindow
from tests.support.fake_ranks import EOS, FakeRanks, expected_output, run_to_end


def sequence(prompt_len: int, max_new: int, **params: object) -> Sequence:
    prompt = [3 + (prompt_len * 7 + i) % 50 for i in range(prompt_len)]
    return Sequence(prompt, SamplingParams(**params), prompt_len + max_new)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop_id", [EOS, 99])
def test_any_stop_id_ends_a_sequence(stop_id: int) -> None:
    ranks = FakeRanks(4, lambda tokens, seed: stop_id if len(tokens) == 6 else 50)
    scheduler = Scheduler(SchedulerConfig(4, 16, frozenset({EOS, 99})), BlockPool(16, 4))
    stopping, ignoring = sequence(4, 9), sequence(4, 9, ignore_eos=True)
    scheduler.add(stopping)
    scheduler.add(ignoring)
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(ranks.step(batch))
    assert stopping.output == [50, 50] and stopping.finish_reason is FinishReason.STOP
    assert ignoring.output == [50, 50, stop_id, *[50] * 6]


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "longest", "room"),
    [
        (0, 1, 4000, TOKENS_ALONE),  # no decode waits
        (0, 6, 4000, 6 * TOKENS_A_PROMPT),
        (0, 20, 4000, 2000),  # a full step
        (1, 1, 4000, TOKENS_A_PROMPT),
        (8, 1, 4000, TOKENS_A_PROMPT),  # one long prompt beside decodes comes in chunks
        (8, 3, 4000, TOKENS_A_PROMPT),
        (8, 4, 4000, 4 * TOKENS_A_PROMPT),  # a burst
        (8, 4, 300, 300),  # slow ranks
    ],
)
def test_prompts_take_little_of_a_step_beside_decodes_unless_they_come_in_a_burst(
    num_decodes: int, num_prompts: int, longest: int, room: int
) -> None:
    scheduler = Scheduler(SchedulerConfig(32, 2000, frozenset({EOS})), BlockPool(10_000, 4))
    ranks = FakeRanks(4)
    running = [sequence(2 + i, 50, ignore_eos=True) for i in range(num_decodes)]
    for seq in running:
        scheduler.add(seq)
    while any(not seq.output for seq in running):
        scheduler.commit(ranks.step(scheduler.schedule()))  # type: ignore[arg-type]
    for i in range(num_prompts):
        scheduler.add(sequence(790 - i, 2, ignore_eos=True))
    scheduler.prompt_budget.limit(longest)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.num_tokens == num_decodes + room


@pytest.mark.parametrize("budget", [64, 150, 512, 5000])
def test_requests_that_arrive_together_compute_their_common_prefix_once(budget: int) -> None:
    scheduler, ranks = Scheduler(SchedulerConfig(32, budget, frozenset({EOS})), BlockPool(2048, 16)), FakeRanks(16)
    prefix = [3 + i * 31 % 997 for i in range(400)]
    prompts = [[*prefix, 1000 + i, 7, 8] for i in range(32)]
    sequences = [Sequence(prompt, SamplingParams(ignore_eos=True), len(prompt) + 8) for prompt in prompts]
    run_to_end(scheduler, ranks, sequences, depth=2)
    assert [seq.output for seq in sequences] == [expected_output(seq) for seq in sequences]
    assert ranks.num_computed == 400 + 32 * (3 + 7), (
        "the prefix once; of each request its own tokens and all generated tokens but one"
    )
    assert scheduler.num_prefix_hits == 31 * 400
    assert [seq.num_cached for seq in sequences] == [0] + [400] * 31


# A model whose every layer has a window: blocks before it are freed, and no row reads a block that was freed.


BLOCK_SIZE = 4


def windowed(window: int, num_blocks: int, *, prefix_caching: bool = True) -> Scheduler:
    config = SchedulerConfig(4, 8, frozenset({EOS}), prefix_caching=prefix_caching, window=window)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))


def with_prompt(prompt: list[int], max_new: int) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=0.0, ignore_eos=True), len(prompt) + max_new)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 300), st.integers(1, 20))
def test_a_row_reads_no_block_behind_the_window_and_fits_into_what_a_sequence_holds(
    size: int, block_size: int, start: int, chunk: int
) -> None:
    window = SlidingWindow(size, block_size, chunk)
    behind = window.num_behind(start)
    first_read = max(0, start + 1 - size)
    assert behind * block_size <= first_read < (behind + 1) * block_size, "as many as possible, and none that is read"
    end = window.row_end(start, 10_000)
    assert end == start + chunk and -(-end // block_size) - behind <= window.num_held(10_000)


def test_no_sequence_is_preempted_where_every_window_has_room() -> None:
    window = SlidingWindow.of(10, BLOCK_SIZE, 8)
    scheduler = windowed(10, 4 * (window.num_held(1000) + 1))
    for n in range(4):
        scheduler.add(with_prompt([3 + n] * (30 + n), 100))
    run_to_end(scheduler, FakeRanks(BLOCK_SIZE, window=10), depth=2)
    assert scheduler.num_preemptions == 0


def run(scheduler: Scheduler, ranks: FakeRanks, seq: Sequence) -> Sequence:
    run_to_end(scheduler, ranks, [seq])
    return seq


def test_a_prefix_is_found_by_the_blocks_of_its_window_alone() -> None:
    scheduler, ranks = windowed(8, num_blocks=10), FakeRanks(BLOCK_SIZE, window=8)
    first = run(scheduler, ranks, with_prompt(list(range(10, 60)), 6))  # 14 blocks: the first are reused for the last
    computed = ranks.num_computed
    second = run(scheduler, ranks, with_prompt([*first.tokens, 5, 6], 5))
    assert second.output == expected_output(second)
    assert second.num_cached == 52 and ranks.num_computed - computed < 12
