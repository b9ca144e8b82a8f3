"""Requests that refer to earlier answers, as SDKs send them by default: by id, at this replica and at another one."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.http.app import HttpApp, build_http_app
from deployments.http.limits import HttpLimits
from deployments.http.request_body import BodyLimits
from deployments.http.responses_api.stored import MAX_ASKING
from deployments.http.resume.kept_streams import KeepLimits
from deployments.observe.metrics import Metrics
from tests.support.asgi_client import AsgiCall
from tests.support.scripted_engine import FakeEngine

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
CALL = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "The weather?"}


def engine_of(answer: str = CALL) -> FakeEngine:
    engine = FakeEngine(answer)
    engine.max_seq_len, engine.tool_format = 4096, "hermes"
    return engine


def app_of(engine: FakeEngine, others: list[HttpApp] | None = None, **given: Any) -> HttpApp:
    async def ask_others(owner: str, ids: list[str]) -> list[Mapping[str, bytes]]:
        return [other.stored.find(owner, ids) for other in others or ()]

    return build_http_app(engine, Metrics(in_ray=False), ask_others=ask_others, **given)


async def ask(app: HttpApp, key: str = "one", **body: Any) -> AsgiCall:
    call = AsgiCall(app, PATH, body, {"authorization": f"Bearer {key}"})
    await call.end()
    return call


async def answer(app: HttpApp, **body: Any) -> dict[str, Any]:
    call = await ask(app, **body)
    assert call.status == 200, call.body
    if not body.get("stream"):
        found: dict[str, Any] = json.loads(call.body)
        return found
    last: dict[str, Any] = json.loads(call.events[-1].partition(b"data: ")[2])
    assert last["type"] == "response.completed"
    return last["response"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_input", ["The weather?", [QUESTION], [{"type": "message", **QUESTION}]])
async def test_turns_that_refer_to_the_last_answer_equal_those_with_all_items(stream: bool, first_input: Any) -> None:
    engine = engine_of()
    first, second = app_of(engine), app_of(engine)
    both = [app_of(engine, [first]), app_of(engine, [second, first])]
    tools = {"tools": [TOOL], "stream": stream}
    one = await answer(first, input=first_input, **tools)
    text, call = one["output"]
    assert one["store"] is True and (text["type"], call["type"]) == ("message", "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    history = [QUESTION, text, call, result]
    await answer(first, input=history, **tools)
    wanted = engine.streams[-1].prompt
    references = [{"type": "item_reference", "id": item["id"]} for item in (text, call)]
    for app in (first, *both):
        two = await answer(app, input=[result], previous_response_id=one["id"], **tools)
        assert engine.streams[-1].prompt == wanted
        await answer(app, input=[QUESTION, *references, result], **tools)
        assert engine.streams[-1].prompt == wanted
    last = await answer(first, input=[*history, *two["output"], QUESTION], **tools)
    wanted = engine.streams[-1].prompt
    await answer(both[1], input=[QUESTION], previous_response_id=two["id"], **tools)
    assert engine.streams[-1].prompt == wanted and last["id"] != two["id"]


async def not_found(app: HttpApp, **body: Any) -> None:
    refused = await ask(app, **{"input": [QUESTION]} | body)
    assert refused.status == 404, refused.body
    error = refused.error()
    assert error["code"] == "previous_response_not_found" and "send the items" in error["message"]


async def test_only_the_key_that_made_an_answer_reads_it() -> None:
    keys = ApiKeys(digests_of("one,two"))
    first = app_of(engine_of(), keys=keys)
    one = await answer(first, input="The weather?")
    for app in (first, app_of(engine_of(), [first], keys=keys)):
        for name in (one["id"], *(item["id"] for item in one["output"])):
            await not_found(app, key="two", previous_response_id=name)
            await not_found(app, key="two", input=[{"type": "item_reference", "id": name}])
        assert (await ask(app, previous_response_id=one["id"], input=[QUESTION])).status == 200


async def test_what_is_not_stored_or_not_complete_is_not_found() -> None:
    app = app_of(engine_of())
    one = await answer(app, input="The weather?", store=False)
    assert one["store"] is False and not app.stored._kept.num_bytes
    await not_found(app, previous_response_id=one["id"])
    await not_found(app, input=[QUESTION, {"type": "item_reference", "id": one["output"][0]["id"]}])
    two = await answer(app, input="The weather?")
    await not_found(app, previous_response_id=two["output"][0]["id"])
    closed = app_of(engine_of(), limits=HttpLimits(keep=KeepLimits(0.0)))
    assert (await answer(closed, input="The weather?"))["store"] is False


async def test_answers_stay_within_the_bounds_of_kept_streams() -> None:
    app = app_of(engine_of("Hello"), limits=HttpLimits(keep=KeepLimits(60.0, 60_000)))
    kept, ids = app.stored._kept, []
    for number in range(30):
        ids.append((await answer(app, input=f"{number}" + "word " * 1000))["id"])
        assert 5_000 < kept.num_bytes <= 60_000
        await answer(app, previous_response_id=ids[0], input="?", store=False)
    await not_found(app, previous_response_id=ids[1])
    assert kept.num_bytes == sum(entry.num_bytes for entry in kept._streams.values())


async def test_an_input_that_grows_over_the_limit_of_a_body_is_refused() -> None:
    app = app_of(engine_of("Hello"), limits=HttpLimits(body=BodyLimits(max_bytes=6_000)))
    one = await answer(app, input="word " * 800)
    refused = await ask(app, previous_response_id=one["id"], input="word " * 800)
    assert refused.status == 413
    item = {"type": "item_reference", "id": one["output"][0]["id"]}
    assert (await ask(app, input=[QUESTION, *[item] * 3, QUESTION])).status == 200
    assert (await ask(app, input=[QUESTION, *[item] * 60, QUESTION])).status == 413


async def test_a_key_whose_ids_are_unknown_delays_no_other_key() -> None:
    asked, is_both, answered = list[str](), asyncio.Event(), asyncio.Event()

    async def ask_others(owner: str, ids: list[str]) -> list[Mapping[str, bytes]]:
        asked.append(owner)
        if len(set(asked)) == 2:
            is_both.set()
        await answered.wait()
        return []

    app = build_http_app(engine_of(), Metrics(in_ray=False), keys=ApiKeys(digests_of("one,two")), ask_others=ask_others)
    await not_found(app, previous_response_id="resp_" + "0" * 1000)
    bodies = [("one", "resp_1")] * 9 + [("two", "resp_2")]
    asking = [asyncio.create_task(ask(app, key, input="a", previous_response_id=name)) for key, name in bodies]
    await asyncio.wait_for(is_both.wait(), 30)
    assert len(asked) == MAX_ASKING + 1
    answered.set()
    assert {call.status for call in await asyncio.gather(*asking)} == {404}


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "a", "previous_response_id": 5}',
        b'{"input": "a", "previous_response_id": []}',
        b'{"input": "a", "previous_response\\u005fid": "resp_1"}',
        b'{"input": [{"type": "item_reference"}]}',
        b'{"input": [{"type": "item\\u005freference", "id": "msg_1"}]}',
        b'{"previous_response_id": "resp_1", "input": [',
        b'["previous_response_id"]',
    ],
)
async def test_references_in_a_body_that_is_wrong_are_400(body: bytes) -> None:
    call = AsgiCall(app_of(engine_of()), PATH, body, {})
    await call.end()
    assert call.status == 400, call.body
