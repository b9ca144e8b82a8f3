"""The real model on two rank actors gives the reference's tokens; a new group continues where a killed one stopped."""

import os
import signal
from collections import deque
from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup

from cluster.driver.rank_group import RankGroup
from llama_core.config import EngineConfig
from llama_core.errors import RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.text.registry import load_tokenizer
from tests.cluster.conftest import LIMITS
from tests.conftest import GOLDEN


def engine_config(golden: dict[str, Any], ckpt_dir: str = str(GOLDEN / "mp1")) -> EngineConfig:
    vocab_size = load_tokenizer(str(GOLDEN / "mp1" / "tokenizer.model")).n_words
    return EngineConfig(
        ckpt_dir=ckpt_dir,
        vocab_size=vocab_size,
        max_seq_len=golden["max_seq_len"],
        max_batch_size=4,
        device="cpu",
        dtype="float32",
    )


class Run:
    """The golden prompts of completions without echo, decoded greedily through a rank group, two steps in flight."""

    def __init__(self, golden: dict[str, Any], num_blocks: int, config: EngineConfig) -> None:
        cases = [case for case in golden["completions"] if not case["echo"]]
        self.expected = [tokens for case in cases for tokens in case["out_tokens"]]
        self.sequences = []
        stop_ids = load_tokenizer(str(GOLDEN / "mp1" / "tokenizer.model")).stop_ids
        self.scheduler = Scheduler(
            SchedulerConfig(config.max_batch_size, config.max_step_tokens, stop_ids),
            BlockPool(num_blocks, config.block_size),
        )
        for case in cases:
            for prompt in case["prompt_tokens"]:
                params = SamplingParams(temperature=0, max_tokens=case["max_gen_len"])
                length = min(golden["max_seq_len"], len(prompt) + case["max_gen_len"])
                self.sequences.append(Sequence(prompt, params, length))
                self.scheduler.add(self.sequences[-1])

    async def steps(self, group: RankGroup, kill_after: int | None = None) -> None:
        pending = deque(group.submit(batch) for batch in [self.scheduler.schedule()] if batch)
        count = 0
        while pending:
            if (batch := self.scheduler.schedule()) is not None:
                pending.append(group.submit(batch))
            if count == kill_after:
                assert group.info is not None
                os.kill(group.info.identities[1].process.pid, signal.SIGKILL)
            self.scheduler.commit(await pending.popleft())
            if not pending and (batch := self.scheduler.schedule()) is not None:
                pending.append(group.submit(batch))
            count += 1


# In each run, tests of servers kill ranks under live streams.
@pytest.mark.full
async def test_two_ranks_give_the_references_tokens_also_after_a_death_midway(
    two_rank_placement: PlacementGroup, golden: dict[str, Any]
) -> None:
    config = engine_config(golden)
    group = RankGroup(config, two_rank_placement, epoch=0, limits=LIMITS)
    info = await group.start()
    assert {report.dtype for report in info.ranks} == {"float32"}
    undisturbed = Run(golden, info.num_blocks, config)
    await undisturbed.steps(group)
    assert [sequence.output for sequence in undisturbed.sequences] == undisturbed.expected

    disturbed = Run(golden, info.num_blocks, config)
    with pytest.raises(RankFailure) as caught:
        await disturbed.steps(group, kill_after=8)
    assert caught.value.rank == 1
    await group.stop()
    assert any(sequence.output for sequence in disturbed.sequences)
    group = RankGroup(config, two_rank_placement, epoch=1, num_blocks=info.num_blocks, limits=LIMITS)
    assert (await group.start()).num_blocks == info.num_blocks
    disturbed.scheduler.restart(epoch=1)
    await disturbed.steps(group)
    await group.stop()
    assert [sequence.output for sequence in disturbed.sequences] == disturbed.expected
