"""A model whose every layer has a window: blocks before it are freed, and no row reads a block that was freed."""

from hypothesis import given
from hypothesis import strategies as st

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.sliding_window import SlidingWindow
from tests.support.fake_ranks import EOS, FakeRanks, expected_output, run_to_end

BLOCK_SIZE = 4


def make(window: int, num_blocks: int, *, prefix_caching: bool = True) -> Scheduler:
    config = SchedulerConfig(4, 8, frozenset({EOS}), prefix_caching=prefix_caching, window=window)
    return Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE))


def sequence(prompt: list[int], max_new: int) -> Sequence:
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
    scheduler = make(10, 4 * (window.num_held(1000) + 1))
    for n in range(4):
        scheduler.add(sequence([3 + n] * (30 + n), 100))
    run_to_end(scheduler, FakeRanks(BLOCK_SIZE, window=10), depth=2)
    assert scheduler.num_preemptions == 0


def run(scheduler: Scheduler, ranks: FakeRanks, seq: Sequence) -> Sequence:
    run_to_end(scheduler, ranks, [seq])
    return seq


def test_a_prefix_is_found_by_the_blocks_of_its_window_alone() -> None:
    scheduler, ranks = make(8, num_blocks=10), FakeRanks(BLOCK_SIZE, window=8)
    first = run(scheduler, ranks, sequence(list(range(10, 60)), 6))  # 14 blocks: the first are reused for the last
    computed = ranks.num_computed
    second = run(scheduler, ranks, sequence([*first.tokens, 5, 6], 5))
    assert second.output == expected_output(second)
    assert second.num_cached == 52 and ranks.num_computed - computed < 12
