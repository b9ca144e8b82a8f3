"""The handle's calls, on the deployment's own class over a group without ranks; Serve is not needed for that."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.args import ServerArgs
from deployments.engine.metrics import Metrics
from deployments.engine.service import LlamaService
from deployments.ingress import LlamaIngress
from llama_core.errors import InvalidDialog, InvalidParameter, QueueFull
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import continuation


@pytest.fixture
async def ingress() -> AsyncIterator[Any]:
    """2 slots and room for 3 to wait."""
    args = ServerArgs(ckpt_dir=str(GOLDEN / "mp1"), max_seq_len=64, max_batch_size=2, max_queue=3)
    made = object.__new__(LlamaIngress)  # without the constructor, which asks Serve
    made.metrics = Metrics(in_ray=False)
    group = FakeGroup()
    made.service = LlamaService(args, lambda: FakeGroupPool(lambda: group))
    await made.service.start()
    yield made
    await made.service.stop()


def counted(ingress: Any) -> dict[str, float]:
    lines = ingress.metrics.render().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in values.items()}


async def test_a_call_with_more_prompts_than_slots_and_queue_waits_for_its_own(ingress: Any) -> None:
    prompts = [[1, 3 + n] for n in range(40)]
    tokens, _ = await ingress.generate(prompts, 6, temperature=0)
    assert tokens == [continuation(prompt, 6) for prompt in prompts]
    assert ingress.service.describe().blocks_used == 0


async def test_a_call_that_finds_the_queue_full_of_others_is_refused(ingress: Any) -> None:
    others = asyncio.create_task(ingress.generate([[1, 5]] * 5, 60, temperature=0))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await ingress.generate([[1, 6]], 4, temperature=0)
    assert len((await others)[0]) == 5


async def test_calls_by_handle_are_counted_by_outcome_and_timed(ingress: Any) -> None:
    await ingress.generate([[1, 5], [1, 6]], 4, temperature=0)
    async for _ in ingress.stream([1, 5], 0, max_gen_len=4):
        pass
    with pytest.raises(InvalidParameter):
        await ingress.generate([[1, 10**6]], 4)
    leaving = asyncio.create_task(ingress.generate([[1, 9]], 60, temperature=0))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    seen = counted(ingress)
    assert seen['requests_total{outcome="ok",path="handle"}'] == 2
    assert seen['requests_total{outcome="invalid_parameter",path="handle"}'] == 1
    assert seen['requests_total{outcome="cancelled",path="handle"}'] == 1
    assert seen["time_to_first_token_seconds_count"] == 2
    assert ingress.service.describe().blocks_used == 0


async def test_an_invalid_dialog_is_counted_under_the_operators_name(ingress: Any) -> None:
    with pytest.raises(InvalidDialog):
        await ingress.chat_completion([[{"role": "assistant", "content": "first"}]])
    assert counted(ingress)["invalid_dialog_assertions_count"] == 1


async def test_a_stream_takes_text_ids_or_a_dialog_and_nothing_else(ingress: Any) -> None:
    for prompt in ("hi", [1, 5], [{"role": "user", "content": "bye"}]):
        pieces = [piece async for piece in ingress.stream(prompt, 0, max_gen_len=4)]
        assert pieces[-1]["finish_reason"] in ("length", "stop")
    with pytest.raises(InvalidParameter, match="prompt"):
        _ = [piece async for piece in ingress.stream(["a", "b"], 0)]


async def test_draining_by_handle_refuses_what_comes_after(ingress: Any) -> None:
    await ingress.drain()
    assert ingress.service.readiness().phase == "draining"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("seed", 2**64)],
)  # fmt: skip
async def test_a_bad_value_by_handle_is_named_and_nobody_else_is_harmed(ingress: Any, field: str, value: float) -> None:
    other = asyncio.create_task(ingress.generate([[1, 5]], 20, temperature=0))
    await asyncio.sleep(0)
    with pytest.raises(InvalidParameter, match=field):
        await ingress.generate([[1, 6], [1, 7]], 4, **{"temperature": 0.5} | {field: value})
    with pytest.raises(InvalidParameter, match=field):
        await anext(ingress.stream([1, 6], **{"temperature": 0.5} | {field: value}))
    assert (await other)[0] == [continuation([1, 5], 20)]
    assert ingress.service.describe().blocks_used == 0
