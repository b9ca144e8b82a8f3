"""The context of a replica: chosen when its first ranks load, required of every later group, and explained."""

from collections.abc import Callable, Sequence

import pytest

from cluster.driver.group_info import GroupInfo
from deployments.args import ServerArgs
from deployments.engine.context import context_reason
from deployments.engine.service import LlamaService
from llama_core.config import UNKNOWN_CONTEXT, EngineConfig
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool, until


class Groups(FakeGroupPool):
    """Records the configuration of each group."""

    def __init__(self, make: Callable[[], FakeGroup]) -> None:
        super().__init__(make)
        self.configs: list[EngineConfig] = []

    def open_group(
        self, config: EngineConfig, epoch: int, num_blocks: int | None, bundle_indices: Sequence[int]
    ) -> FakeGroup:
        self.configs.append(config)
        return super().open_group(config, epoch, num_blocks, bundle_indices)


class SmallGroup(FakeGroup):
    """Has memory for a context of 1,008 tokens."""

    async def start(self) -> GroupInfo:
        info = await super().start()
        return GroupInfo(info.epoch, info.num_blocks, info.ranks, max_seq_len=1008)


async def test_the_context_that_the_first_ranks_choose_is_required_of_later_ranks() -> None:
    groups = Groups(SmallGroup)
    service = LlamaService(ServerArgs(ckpt_dir=str(GOLDEN / "mp2"), max_batch_size=8), groups)
    await service.start()
    assert service.config.max_seq_len == service.describe().max_seq_len == 1008
    assert service.describe().max_seq_len_reason == "what memory holds of the model's 2,048"
    groups.made[0].fail()
    await until(lambda: len(groups.configs) == 2)
    first, second = groups.configs
    assert (first.max_seq_len, first.lowers_max_seq_len) == (UNKNOWN_CONTEXT, True)
    assert (second.max_seq_len, second.lowers_max_seq_len) == (1008, False)
    await service.stop()


@pytest.mark.parametrize(
    ("chosen", "configured", "of_model", "reason"),
    [
        (8192, None, 8192, "the model's context"),
        (6144, None, 131_072, "what memory holds of the model's 131,072"),
        (2048, None, None, "the default where a checkpoint does not say its context"),
        (512, 512, 8192, "as configured"),
        (9000, 9000, 8192, "as configured, beyond the model's context of 8,192"),
    ],
)
def test_the_reason_for_a_context_is_named(
    chosen: int, configured: int | None, of_model: int | None, reason: str
) -> None:
    assert context_reason(chosen, configured, of_model) == reason
