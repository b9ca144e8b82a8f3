"""Freed blocks behind a sliding window change no bit: the same texts and logprobs as in a cache that holds everything."""

from dataclasses import replace

import pytest

from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.model_config import FULL_ATTENTION, ModelConfig
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.sliding_window import SlidingWindow
from tests.support import plain_model

MODEL = ModelConfig(64, 3, 6, 3, 16, 96, 131, windows=(33, 20, 33), context_length=400)
CHUNK = 24
PROMPTS = [[1 + (7 * n + i * 37) % 130 for i in range(n)] for n in (200, 3, 90, 31)]


def run(runner: ModelRunner, window: int, num_blocks: int) -> tuple[list[list[int]], list[list[float]], int]:
    """Outputs, logprobs and the most cache blocks in use."""
    config = SchedulerConfig(4, CHUNK, frozenset(), max_drafts=8, window=window)
    scheduler = Scheduler(config, BlockPool(num_blocks, runner.config.block_size))
    params = SamplingParams(temperature=0.7, logprobs=0, ignore_eos=True)
    sequences = [Sequence(prompt, replace(params, seed=len(prompt)), len(prompt) + 150) for prompt in PROMPTS]
    for seq in sequences:
        scheduler.add(seq)
    most = 0
    while (batch := scheduler.schedule()) is not None:
        most = max(most, scheduler.pool.num_used)
        scheduler.commit(runner.step(batch))
    assert not scheduler.has_work
    return [seq.output for seq in sequences], [[p.logprob for p in seq.logprobs] for seq in sequences], most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_have_the_same_bits_in_a_windows_blocks_as_in_a_full_cache(dtype: str) -> None:
    window = SlidingWindow.of(MODEL.longest_window, 16, CHUNK)
    few = window.num_held(400) + 2
    runner = plain_model.load_runner(
        alone("cpu"), MODEL, dtype=dtype, max_seq_len=400, max_batch_size=16, max_step_tokens=CHUNK, backend="native"
    )
    whole = run(runner, FULL_ATTENTION, 90)
    freed = run(runner, MODEL.longest_window, few)
    assert freed[:2] == whole[:2]
    assert freed[2] <= few < whole[2] / 3
