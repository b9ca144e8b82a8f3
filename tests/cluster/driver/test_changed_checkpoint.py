"""A checkpoint that is replaced while it is served: new ranks refuse it. Real rank actors."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from ray.util.placement_group import PlacementGroup

from cluster.driver.standby import StandbyPool
from deployments.args import ServerArgs
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from llama_core.errors import EngineError
from llama_core.scheduling.sampling_params import SamplingParams
from tests.cluster.conftest import LIMITS
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.requests import submit


async def test_streams_end_with_checkpoint_changed_when_new_ranks_find_other_weights(
    two_rank_placement: PlacementGroup, tmp_path: Path
) -> None:
    write(tmp_path, split(random_weights(WIDE), 2))
    args = ServerArgs(ckpt_dir=str(tmp_path), max_seq_len=2048, max_batch_size=2, device="cpu", backend="torch")
    pool = StandbyPool(two_rank_placement, LIMITS, enabled=False)
    service = LlamaService(args, pool)
    front = OwnEngine(service, args)
    try:
        await front.start()
        stream = submit(front, [1, 5, 9], SamplingParams(max_tokens=2000, ignore_eos=True))
        await anext(stream)
        write(tmp_path, split(random_weights(WIDE, seed=1), 2))
        assert service.info is not None
        os.kill(service.info.identities[1].process.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(_read(stream), 200)
        assert caught.value.code == "checkpoint_changed", caught.value
        assert "consolidated.00.pth" in caught.value.message
        assert not service.live(), "Serve replaces a replica that is not live"
    finally:
        await front.stop()


async def _read(stream: SequenceStream) -> None:
    async for _ in stream:
        pass
