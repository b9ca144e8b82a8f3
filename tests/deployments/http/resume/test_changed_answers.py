"""A client that comes back gets the rest of its own answer, or 409: never the rest of another one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.interface import Engine, SamplingDefaults
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet.model_view import ModelView
from deployments.http.app import HttpApp, build_http_app
from deployments.http.limits import HttpLimits
from deployments.http.resume import resumption
from deployments.http.resume.kept_streams import KeepLimits
from deployments.links.messages import Load
from deployments.observe.metrics import Metrics
from llama_core.scheduling.request import Request, Terms
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.deployments.http.resume.test_resumed_streams import BODY, CHAT, HELLO, app_of, call, cut
from tests.support.asgi_client import AsgiCall
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import EOS
from tests.support.fleets import FleetOfEngines
from tests.support.joined_events import id_of, joined
from tests.support.loop_engine import LoopEngine
from tests.support.recovering_service import steady

IDS: dict[str, Any] = {"model": "demo", "prompt": [1, 5, 6], "max_tokens": 30, "temperature": 0, "stream": True}
DATED = "{{ strftime_now('%d %b %Y %f') }}: {% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def slow() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=0.003, token=steady)


def front_of(fleet: FleetOfEngines, window_s: float = 0.0) -> HttpApp:
    """window_s: 0: a stream whose client leaves is computed again."""
    return build_http_app(fleet.fleet, Metrics(in_ray=False), HttpLimits(keep=KeepLimits(window_s)))


async def refused(answer: AsgiCall) -> None:
    await answer.end()
    assert answer.status == 409 and answer.error()["code"] == "answer_changed"
    assert "without Last-Event-ID" in answer.error()["message"] and answer.error()["param"] == "Last-Event-ID"


@pytest.mark.parametrize("num_events", [1, 12])
async def test_engines_with_other_numerics_do_not_go_on(num_events: int) -> None:
    async with FleetOfEngines(slow) as first, FleetOfEngines(slow) as other:
        await first.start()
        await other.start(model_parallel_size=1)
        events = await cut(front_of(first), IDS, "a", num_events)
        await refused(call(front_of(other), IDS, "a", id_of(events[-1])))
        anew = await call(front_of(other), IDS, "a").end()
        assert len(joined(anew)) and anew[-1].endswith(b"[DONE]")


async def test_of_two_versions_the_one_that_began_an_answer_goes_on() -> None:
    async with FleetOfEngines(slow) as fleet:
        engines = [await fleet.start(), await fleet.start(model_parallel_size=1)]
        app = front_of(fleet)
        uncut = await call(app, IDS, "").end()
        events = await cut(app, IDS, "a", 12)
        began, other = sorted(engines, key=lambda each: -each.service.loop.num_requests)
        (link,) = [x for x in fleet.links if x.engine_id == began.service.engine_id]
        link.load = Load(running=1000)  # so that a new request goes to the other
        before = began.service.loop.num_requests, other.service.loop.num_requests
        rest = await call(app, IDS, "a", id_of(events[-1])).end()
        assert joined(events + rest) == joined(uncut)
        assert (began.service.loop.num_requests, other.service.loop.num_requests) == (before[0] + 1, before[1])


async def test_an_engine_that_comes_later_with_other_numerics_does_not_go_on() -> None:
    async with FleetOfEngines(slow) as fleet:
        first, app = await fleet.start(), front_of(fleet)
        events = await cut(app, IDS, "a", 12)
        first.die()
        await until(lambda: not fleet.links)
        waiting = call(app, IDS, "a", id_of(events[-1]))
        await until(lambda: bool(fleet.fleet._models["demo"]._held))
        await fleet.start(model_parallel_size=1)
        await refused(waiting)


async def test_an_answer_that_ends_elsewhere_with_other_numerics_does_not_go_on() -> None:
    """The client has the end of one choice, and that engine's answer has it at another place."""
    answers = [[7, 8, EOS], [7, 8, 9, 10, EOS]]

    def scripted() -> FakeGroup:
        own = answers.pop(0)
        return FakeGroup(num_blocks=400, step_s=0.003, token=lambda tokens: own[min(len(tokens) - 3, len(own) - 1)])

    body = IDS | {"stream_options": {"include_usage": True}}
    async with FleetOfEngines(scripted) as fleet:
        first, app = await fleet.start(), front_of(fleet)
        whole = await call(app, body, "a").end()
        ended = next(event for event in whole if b'"finish_reason":"stop"' in event)
        assert id_of(ended).startswith("2e~") and whole[-1] != ended
        first.die()
        await until(lambda: not fleet.links)
        waiting = call(app, body, "a", id_of(ended))
        await until(lambda: bool(fleet.fleet._models["demo"]._held))
        await fleet.start(model_parallel_size=1)
        await refused(waiting)


async def test_a_kept_stream_whose_engines_have_all_changed_is_dropped() -> None:
    async with FleetOfEngines(slow) as fleet:
        first, app = await fleet.start(), front_of(fleet, 60.0)
        events = await cut(app, IDS, "a", 12)
        await fleet.start(model_parallel_size=1)
        first.die()
        await until(lambda: len(fleet.links) == 1)
        await refused(call(app, IDS, "a", id_of(events[-1])))
        await refused(call(app, IDS, "a", id_of(events[-1])))
        assert (await call(app, IDS, "a").end())[-1].endswith(b"[DONE]")


class Poet(LoopEngine):
    """With a model of an adapter, whose requests its ranks compute as the others."""

    digest = "digest"

    @property
    def models(self) -> dict[str, Engine]:
        return {"poet": ModelView(self, "poet", self.digest)}

    async def submit(self, request: Request, **options: Any) -> Sequence[SequenceStream]:
        return await super().submit(replace(request, terms=Terms()), **options)


def _other_defaults(engine: LoopEngine) -> None:
    engine.loop_service.sampling_defaults = SamplingDefaults(top_p=0.5)


def _other_template(engine: LoopEngine) -> None:
    text = engine.loop_service.text
    engine.loop_service.text = text._replace(chat_format=TemplateChatFormat(text.tokenizer, DATED))


def _other_adapter(engine: Poet) -> None:
    engine.digest = "another digest"


@pytest.mark.parametrize("change", [_other_defaults, _other_template, _other_adapter])
async def test_what_changes_the_answer_of_the_same_request(change: Callable[[Poet], None]) -> None:
    engine, other = Poet(), Poet()
    async with engine.running(), other.running():
        body = HELLO | {"model": "poet", "max_tokens": 40, "seed": 7}
        uncut = await call(app_of(engine), body, "", path=CHAT).end()
        for num_events in (1, 12):
            key = str(num_events)
            events = await cut(app_of(engine), body, key, num_events, CHAT)
            rest = await call(app_of(other), body, key, id_of(events[-1]), CHAT).end()
            assert joined(events + rest) == joined(uncut)
        change(other)
        await refused(call(app_of(other), body, key, id_of(events[-1]), CHAT))
        await until(lambda: not other.num_live)


async def test_a_key_that_was_rotated_has_other_answers() -> None:
    async with LoopEngine().running() as engine:
        fronts = [
            build_http_app(engine, Metrics(in_ray=False), keys=ApiKeys(digests_of(key))) for key in ("old", "new")
        ]
        events = await cut(fronts[0], BODY, "a", 5, authorization="Bearer old")
        await refused(call(fronts[1], BODY, "a", id_of(events[-1]), authorization="Bearer new"))


async def test_a_template_reads_the_time_at_which_the_answer_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LoopEngine().running() as engine, LoopEngine().running() as other:
        for each in (engine, other):
            _other_template(each)
        body = HELLO | {"max_tokens": 24, "seed": 7}
        monkeypatch.setattr(resumption, "time", SimpleNamespace(time=lambda: 1_790_000_000.5))
        events = await cut(app_of(engine), body, "a", 5, CHAT)
        uncut = await call(app_of(engine), body, "a", path=CHAT).end()
        monkeypatch.setattr(resumption, "time", SimpleNamespace(time=lambda: 1_790_090_000.5))
        rest = await call(app_of(other), body, "a", id_of(events[-1]), CHAT).end()
        assert joined(events + rest) == joined(uncut)
        tomorrows = await call(app_of(other), body, "b", path=CHAT).end()
        assert joined(tomorrows) != joined(uncut), "the answer depends on the day"


async def test_an_id_of_the_former_version_goes_on() -> None:
    async with LoopEngine().running() as engine, LoopEngine().running() as other:
        events = await cut(app_of(engine), BODY, "a", 5)
        rest = await call(app_of(other), BODY, "a", id_of(events[-1]).partition("~")[0]).end()
        assert joined(events + rest) == joined(await call(app_of(engine), BODY, "").end())
