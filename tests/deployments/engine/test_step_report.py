"""The report of a step for metrics."""

import asyncio

from deployments.engine.step_pacing import SentStep
from deployments.engine.step_report import StepReports, StepStats
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepOutput
from llama_core.scheduling.step_costs import StepShape


async def test_a_step_of_deferred_rows_alone_is_no_decode_and_gives_no_token() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, frozenset({2})), BlockPool(16, 16))
    reports = StepReports(scheduler)
    for _ in range(2):
        scheduler.add(Sequence([1], SamplingParams(grammar="g"), 9))

    def complete(deferred: list[int]) -> StepStats:
        batch = scheduler.schedule()
        assert batch is not None
        output = StepOutput(0, batch.step, [5, 5], deferred=deferred, elapsed_ms=50.0)
        sent = SentStep(batch, asyncio.Future(), StepShape.of(batch), 0.0, False)
        return reports.of(sent, output, scheduler.commit(output), ())

    all_deferred, one_deferred, none_deferred = complete([0, 1]), complete([1]), complete([])
    assert (all_deferred.is_decode, all_deferred.num_sampled, all_deferred.num_deferred) == (False, 0, 2)
    assert (one_deferred.is_decode, one_deferred.num_sampled, one_deferred.num_deferred) == (True, 1, 1)
    assert (none_deferred.is_decode, none_deferred.num_sampled, none_deferred.num_deferred) == (True, 2, 0)


async def test_deferred_rows_of_an_ended_sequence_do_not_count() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, frozenset({2})), BlockPool(16, 16))
    reports, sequences = StepReports(scheduler), [Sequence([1], SamplingParams(grammar="g"), 9) for _ in range(2)]
    for seq in sequences:
        scheduler.add(seq)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.finish(sequences[0], FinishReason.ABORT)
    output = StepOutput(0, batch.step, [0, 0], deferred=[0, 1])
    sent = SentStep(batch, asyncio.Future(), StepShape.of(batch), 0.0, False)
    assert reports.of(sent, output, scheduler.commit(output), ()).num_deferred == 1
