"""A model whose every layer has a window: blocks behind it are freed, and no row ever reads a block that was freed.

`FakeRanks` raise where a position in the window of a row holds other tokens than the row's own.
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.sliding_window import MAX_CHUNK, SlidingWindow
from tests.fuzz.scheduler_rules import Bench, World
from tests.llama_core.scheduling.test_scheduler import run_to_end
from tests.support.fake_ranks import EOS, FakeRanks, arbitrary, expected_output

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


def test_without_a_window_a_sequence_holds_all_its_blocks_and_its_chunks_have_no_bound() -> None:
    window = SlidingWindow.of(0, 16, 2048)
    assert (window.num_behind(5000), window.num_held(5000), window.row_end(0, 5000)) == (0, 313, 5000)
    assert SlidingWindow.of(4096, 16, 2048).num_held(32_768) == -(-(4095 + MAX_CHUNK) // 16) + 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_long_sequences_run_in_the_blocks_of_a_window_and_a_chunk(depth: int) -> None:
    window = SlidingWindow.of(10, BLOCK_SIZE, 8)
    scheduler = make(10, window.num_held(1000))
    sequences = [sequence([3 + (7 * n + i) % 50 for i in range(n)], 150) for n in (3, 120, 40)]
    for seq in sequences:
        scheduler.add(seq)
    run_to_end(scheduler, FakeRanks(BLOCK_SIZE, window=10), depth)
    assert [seq.output for seq in sequences] == [expected_output(seq) for seq in sequences]
    assert scheduler.pool.num_used == 0


def test_no_sequence_is_preempted_where_every_window_has_room() -> None:
    window = SlidingWindow.of(10, BLOCK_SIZE, 8)
    scheduler = make(10, 4 * (window.num_held(1000) + 1))
    for n in range(4):
        scheduler.add(sequence([3 + n] * (30 + n), 100))
    run_to_end(scheduler, FakeRanks(BLOCK_SIZE, window=10), 2)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_on_windows_break_no_rule(seed: int) -> None:
    draw = Random(seed)
    size = draw.choice((1, 2, 4, 5, 9, 12))
    slots, extra = draw.randint(1, 4), draw.randint(0, 8)
    least = SlidingWindow.of(size, BLOCK_SIZE, slots + extra).num_held(28)
    bench = Bench(World(num_blocks=draw.randint(least, 9), slots=slots, extra_tokens=extra, depth=draw.randint(1, 3),
                        max_drafts=draw.choice((0, 8)), prefix_caching=draw.random() < 0.8, window=size))  # fmt: skip
    for _ in range(150):
        operation = draw.randrange(8)
        if operation < 2:
            own = [draw.randint(3, 9) for _ in range(draw.randint(1, 12))]
            bench.add(draw.randrange(4), own, draw.randint(1, 25), seed=draw.randint(0, 3), oracle=draw.random() < 0.5)
        elif operation < 5:
            bench.schedule()
        elif operation < 7:
            bench.commit(spoilt=draw.choice((None, None, None, 0)), sends_first=draw.random() < 0.5)
        elif draw.random() < 0.1:
            bench.fail(unsent=draw.random() < 0.5)
        elif bench.heard:
            bench.finish(draw.choice(list(bench.heard)), FinishReason.ABORT)
        bench.check()
    bench.drain()


def run(scheduler: Scheduler, ranks: FakeRanks, seq: Sequence) -> Sequence:
    scheduler.add(seq)
    run_to_end(scheduler, ranks)
    return seq


def test_a_prefix_is_found_by_the_blocks_of_its_window_alone() -> None:
    scheduler, ranks = make(8, num_blocks=10), FakeRanks(BLOCK_SIZE, window=8)
    first = run(scheduler, ranks, sequence(list(range(10, 60)), 6))  # 14 blocks: the first are reused for the last
    computed = ranks.num_computed
    second = run(scheduler, ranks, sequence([*first.tokens, 5, 6], 5))
    assert second.output == expected_output(second)
    assert second.num_cached == 52 and ranks.num_computed - computed < 12


def test_a_prefix_shorter_than_the_window_is_found_whole() -> None:
    scheduler, ranks = make(20, num_blocks=20), FakeRanks(BLOCK_SIZE, window=20)
    first, second = (run(scheduler, ranks, sequence(list(range(10, 19)), 2)) for _ in range(2))
    assert (first.num_cached, second.num_cached) == (0, 8) and second.output == first.output


def test_blocks_that_a_failed_sequence_has_released_are_not_found() -> None:
    scheduler, ranks = make(4, num_blocks=20), FakeRanks(BLOCK_SIZE, window=4)
    seq = sequence(list(range(10, 40)), 20)
    ranks.non_finite_at = (0, 45)
    run(scheduler, ranks, seq)
    assert seq.finish_reason is FinishReason.ERROR
    ranks.non_finite_at = None
    assert run(scheduler, ranks, sequence(list(range(10, 40)), 2)).num_cached == 0


def test_the_fake_ranks_notice_a_block_that_is_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(10, num_blocks=12, prefix_caching=False)  # a block that is not found again is reused at once
    for n in range(3):
        scheduler.add(sequence([3 + n] * 20, 40))
    monkeypatch.setattr(SlidingWindow, "num_behind", lambda self, start: max(0, start + 1 - 6) // BLOCK_SIZE)
    with pytest.raises((AssertionError, KeyError)):
        run_to_end(scheduler, FakeRanks(BLOCK_SIZE, arbitrary, window=10), 2)
