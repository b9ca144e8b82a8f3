"""Runs a batch of sequences to their ends in this process: the loop of `Llama.generate`, which needs no tokenizer."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from llama_core.backends.runner import ModelRunner
from llama_core.files.adapter import Adapter
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Pending, StepOutput


def run_batch(
    runner: ModelRunner,
    num_blocks: int,
    stop_ids: frozenset[int],
    sequences: Seq[Sequence],
    adapters: Iterable[Adapter] = (),
) -> None:
    """Generate until every sequence has ended. num_blocks: of the runner's cache. adapters: those that the sequences may have.
    The same on every rank."""
    # Each call has its own scheduler, so that an exception in one call does not affect the next.
    config = runner.config
    scheduler = Scheduler(
        SchedulerConfig.of(config, stop_ids, window=runner.model_config.longest_window),
        BlockPool(num_blocks, config.block_size),
    )
    if runner.parallel.device.type == "cuda":
        # Nobody waits for single tokens here, and long chunks use a GPU better. The same on every rank.
        scheduler.prompt_budget.use_chunk(config.max_step_tokens)
    scheduler.adapter_places.folders |= {adapter.digest: adapter.folder for adapter in adapters}
    for seq in sequences:
        scheduler.add(seq)
    is_alone = runner.parallel.world_size == 1
    # While a GPU computes a step, the loop queues the next step before it waits. It reads a completed step first:
    # otherwise the next step would compute rows of sequences that have just ended.
    in_flight: Pending[StepOutput] | None = None
    while (batch := scheduler.schedule()) is not None or in_flight is not None:
        following = runner.start(batch) if batch is not None else None
        if in_flight is not None:
            scheduler.commit(_known_to_all(in_flight.result(), is_alone))
        in_flight = following
        if in_flight is not None and in_flight.is_done:
            scheduler.commit(_known_to_all(in_flight.result(), is_alone))
            in_flight = None
    assert not scheduler.has_work, "every sequence has ended"


def _known_to_all(output: StepOutput, is_alone: bool) -> StepOutput:
    """The output without what rank 0 alone knows: every rank makes the same schedule."""
    return output if is_alone or not output.forced else replace(output, forced=[])
