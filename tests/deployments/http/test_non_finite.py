"""Logits that are not finite: the request is answered 500 and counted, and its neighbours get their own text."""

import asyncio
from typing import Any

import httpx
import pytest

from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from deployments.observe.metrics import Metrics
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.http import samples
from tests.support.scripted_engine import in_process


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_whose_logits_are_not_finite_gets_500_and_is_counted_and_no_other(stream: bool) -> None:
    group = FakeGroup(token=lambda tokens: 5, step_s=0.001)
    metrics = Metrics(in_ray=False)
    args = ServerArgs(ckpt_dir=str(GOLDEN / "mp2"), max_seq_len=64, max_batch_size=4)
    service = OwnEngine(LlamaService(args, FakeGroupPool(lambda: group), on_step=metrics.on_step), args)
    await service.start()
    async with in_process(service, metrics) as client:

        async def ask(prompt: list[int]) -> httpx.Response:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": stream}
            return await client.post("/v1/completions", json=body)

        group.ranks.non_finite_at = (0, 2)  # the first token of the sequence in slot 0
        answers = await asyncio.gather(*(ask([1, 3 + i]) for i in range(3)))
        failed = [answer for answer in answers if answer.status_code == 500]
        assert len(failed) == 1 and failed[0].json()["error"]["code"] == "non_finite_logits"
        assert [answer.status_code for answer in answers if answer not in failed] == [200, 200]
        group.ranks.non_finite_at = None
        assert (await ask([1, 9])).status_code == 200, "the slot's next sequence is not affected"
        figures = samples((await client.get("/metrics")).text)
    assert figures["llama_non_finite_logits_total"] == 1
    assert service.describe().blocks_used == 0 and service.live()
    await service.stop()
