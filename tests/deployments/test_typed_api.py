"""The typed API by handle, on the deployment's class over a fake group, without Serve."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.args import ServerArgs
from deployments.engine.metrics import Metrics
from deployments.engine.service import LlamaService
from deployments.ingress import LlamaIngress
from deployments.typed_api import Sampled
from llama_core.errors import InvalidParameter
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import continuation
from tests.support.waiting import until_true


@pytest.fixture
async def ingress() -> AsyncIterator[Any]:
    args = ServerArgs(ckpt_dir=str(GOLDEN / "mp1"), max_seq_len=64, max_batch_size=4)
    made = object.__new__(LlamaIngress)  # without the constructor, which calls Serve
    made.metrics = Metrics(in_ray=False)
    group = FakeGroup()
    made.service = LlamaService(args, lambda: FakeGroupPool(lambda: group))
    await made.service.start()
    yield made
    await made.service.stop()


async def test_prompts_are_continued_with_their_own_parameters(ingress: Any) -> None:
    params = [SamplingParams(0.0, max_tokens=3, ignore_eos=True), SamplingParams(0.0, max_tokens=5)]
    found = await ingress.sample([[1, 5], [1, 9, 4]], params)
    assert [one.tokens for one in found] == [continuation([1, 5], 3), continuation([1, 9, 4], 5)]
    assert [one.finish_reason for one in found] == ["length", "stop"]
    assert [one.num_prompt_tokens for one in found] == [2, 3]
    tokenizer = ingress.service.tokenizer
    assert [one.text for one in found] == [tokenizer.decode(one.tokens) for one in found]
    assert ingress.service.describe().blocks_used == 0
    assert await ingress.sample([], params[0]) == []


async def test_a_stream_gives_the_same_in_parts(ingress: Any) -> None:
    params = SamplingParams(0.0, max_tokens=6, ignore_eos=True)
    [whole] = await ingress.sample([[1, 5]], params)
    parts: list[Sampled] = [part async for part in ingress.stream_sample([1, 5], params)]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [part.finish_reason for part in parts][-1] == "length"


async def test_abort_ends_every_sequence_of_a_request_id(ingress: Any) -> None:
    params = SamplingParams(0.0, max_tokens=60, ignore_eos=True)
    running = asyncio.create_task(ingress.sample([[1, 5], [1, 6]], params, request_id="mine"))
    await until_true("both run", lambda: ingress.service.describe().requests_running == 2, pause_s=0)
    assert await ingress.abort("mine") is True
    assert [one.finish_reason for one in await running] == ["abort", "abort"]
    assert ingress.service.describe().blocks_used == 0
    assert await ingress.abort("mine") is False and await ingress.abort("other") is False


async def test_invalid_parameters_are_named(ingress: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        await ingress.sample([[1, 5]], [])
    assert refused.value.param == "params"
    with pytest.raises(InvalidParameter) as refused:
        await ingress.sample([[1, 5]], SamplingParams(grammar="start: missing"))
    assert refused.value.param == "grammar"
    with pytest.raises(InvalidParameter) as refused:
        await ingress.score([1], [[]])
    assert refused.value.param == "continuations"
