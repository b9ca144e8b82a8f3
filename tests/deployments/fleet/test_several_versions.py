"""Engines of several models, and of several versions of one model, on one front."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.fleet.model_view import EngineText
from deployments.handle.api import HandleApi
from deployments.handle_types import ChatRequest
from deployments.links.messages import Load
from llama_core.errors import NotReady
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_cluster import QuietMetrics
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import AS_UVLOOP, network

LOOPS = AS_UVLOOP
PROMPT = [1, *range(3, 20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
OTHER_TEXT = "{{ messages[0]['content'] }}"


def group() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=0.05, token=steady)


def right(prompt: list[int] = PROMPT) -> list[int]:
    return continuation(prompt, 60, steady)


@pytest.mark.parametrize("other", [None, {}, {"chat_template": OTHER_TEXT}], ids=["none", "same files", "other files"])
@pytest.mark.parametrize("pause_s", [0.1, 20.0])
async def test_held_streams_of_a_model_outlive_meetings_with_engines_of_another(
    other: dict[str, str] | None, pause_s: float
) -> None:
    async with FleetOfEngines(group) as fleet:
        first = await fleet.start(model_id="x")
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await until(lambda: len(stream.sequence.output) > 5)
        assert first.server is not None
        await first.server.hand_over(has_successor=True, timeout_s=5)
        network().kill(first.process)
        await asyncio.sleep(pause_s)
        if other is not None:
            await fleet.start(model_id="y", **other)
        await asyncio.sleep(pause_s)
        await fleet.start(model_id="x")
        assert await asyncio.wait_for(read(stream), 10) == right()


async def test_a_new_version_whose_first_engine_dies_leaves_requests_to_the_old_engines() -> None:
    async with FleetOfEngines(group) as fleet, FleetOfEngines(group) as later:
        old = [await fleet.start() for _ in range(3)]
        new = await fleet.start(chat_template=OTHER_TEXT)
        streams = [stream for token in range(3, 15) for stream in await fleet.submit([1, 9, token], GREEDY)]
        assert [await read(stream) for stream in streams] == [right([1, 9, token]) for token in range(3, 15)]
        num_old = sum(engine.service.loop.num_requests for engine in old)
        assert num_old >= 6, "they have three of the four engines"
        for engine in fleet.engines:
            assert engine.invitation is not None
            await later.meet(engine.invitation)
        network().kill(new.process)
        await asyncio.sleep(0.2)
        for front in (fleet, later):
            assert front.fleet.readiness().ready
            (stream,) = await front.submit(PROMPT, GREEDY)
            assert await asyncio.wait_for(read(stream), 10) == right()


async def test_a_stream_goes_on_beside_an_engine_of_another_version() -> None:
    """With its own version's engine, as long as that one serves; then with that version's next one."""
    async with FleetOfEngines(group) as fleet:
        old = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await until(lambda: len(stream.sequence.output) > 5)
        await fleet.start(chat_template=OTHER_TEXT)
        await asyncio.sleep(0.5)
        assert old.service.loop.num_live == 1
        network().kill(old.process)
        await asyncio.sleep(0.5)
        assert not stream.ended
        await fleet.start()
        assert await asyncio.wait_for(read(stream), 10) == right()


async def test_a_request_is_computed_by_engines_with_the_tokenizer_of_its_prompt_alone() -> None:
    async with FleetOfEngines(group) as fleet:
        first, other = await fleet.start(max_batch_size=1), await fleet.start(max_batch_size=1)
        model = fleet.fleet._models["demo"]
        link, model.links[1].tokenizer_digest = model.links[0], "another"
        assert link.text is not None
        text = EngineText(link.text, link.tokenizer_digest, link.defaults)
        for token in range(3, 6):
            request = Request([[1, 9, token]], [GREEDY])
            await fleet.process.run(model.submit(request, text=text))
        await asyncio.sleep(1.5)
        assert (first.service.loop.num_live, other.service.loop.num_live) == (3, 0)
        assert model.text.tokenizer_digest == "another", "that engine has the most room"
        network().kill(first.process)
        await asyncio.sleep(1.5)
        assert other.service.loop.num_live == 0


async def test_an_answer_goes_on_where_it_began_though_it_was_planned_anew_with_another_tokenizer(
    tmp_path: Path,
) -> None:
    other = tmp_path / "tokenizer.model"
    other.write_bytes((GOLDEN / "mp2" / "tokenizer.model").read_bytes() + b"\xc0\x0c\x01")  # a field that nobody reads
    async with FleetOfEngines(group) as fleet:
        await fleet.start(tokenizer_path=str(other))
        await fleet.start()
        began, planned = fleet.links
        assert began.text is not None and planned.text is not None
        text = EngineText(planned.text, planned.tokenizer_digest, planned.defaults)
        request = Request(prompts=[PROMPT], params=[GREEDY])
        (stream,) = await fleet.fleet._models["demo"].submit(request, numerics=began.numerics, text=text)
        assert await asyncio.wait_for(read(stream), 10) == right()
        assert stream.numerics == began.numerics != planned.numerics


async def test_a_request_is_planned_with_the_text_of_the_engine_with_the_most_room() -> None:
    async with FleetOfEngines(group) as fleet:
        for _ in range(2):
            await fleet.start()
        model = fleet.fleet._models["demo"]
        for link, digest, running in zip(model.links, ("a", "b"), (1, 2), strict=True):
            link.tokenizer_digest, link.load = digest, Load(running=running)
        assert model.text.tokenizer_digest == "a"
        model.links[0].load = Load(running=3)
        assert model.text.tokenizer_digest == "b"


async def test_a_call_by_handle_is_planned_with_the_template_that_its_engines_have_now() -> None:
    async with FleetOfEngines(group) as fleet:
        handle = HandleApi()
        handle.metrics, handle.service, handle.tracing = QuietMetrics(), fleet.fleet, None

        async def prompt_tokens() -> int:
            answer = await handle.chat(ChatRequest([{"role": "user", "content": "Hi"}]), replace(GREEDY, max_tokens=1))
            return answer.num_prompt_tokens

        old = await fleet.start()
        former = await prompt_tokens()
        await fleet.start(chat_template=20 * "more " + OTHER_TEXT)
        old.die()
        await until(lambda: len(fleet.links) == 1)
        assert await prompt_tokens() > former


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_request_without_tokens_ends_with_the_last_engine_that_has_its_tokenizer(
    num_tokens: int, tmp_path: Path
) -> None:
    """One that has tokens waits for an engine of its release; one that has none can be sent again, with another prompt."""
    other = tmp_path / "tokenizer.model"
    other.write_bytes((GOLDEN / "mp2" / "tokenizer.model").read_bytes() + b"\xc0\x0c\x01")  # a field that nobody reads
    async with FleetOfEngines(group) as fleet:
        failed = await fleet.start(tokenizer_path=str(other))
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await until(lambda: len(stream.sequence.output) >= num_tokens)
        await fleet.start()
        failed.die()
        began_s = time.monotonic()
        with pytest.raises(NotReady, match="within 60 s" if num_tokens else "send it again"):
            await read(stream)
        assert (time.monotonic() - began_s < 1.0) == (not num_tokens)
