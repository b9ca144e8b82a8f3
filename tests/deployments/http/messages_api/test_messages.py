"""Anthropic's messages: blocks, tools, streamed events, stop reasons and errors in that API's shape."""

import json
from typing import Any

import httpx
import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.interface import Models
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.support.loop_engine import LoopEngine
from tests.support.scripted_engine import FakeEngine, calling_engine, in_process

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": CITY}]
SEARCH = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3, "allowed_callers": ["direct", "x"]}]
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "sun"}
CALL = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Paulo"}}\n</tool_call>'


async def post(engine: Models, path: str = "/v1/messages", keys: str = "", **body: Any) -> httpx.Response:
    headers = {"x-api-key": "right", "anthropic-version": "2023-06-01", "anthropic-beta": "a-1"}
    body = {"messages": HELLO, "max_tokens": 500} | body
    async with in_process(engine, keys=ApiKeys(digests_of(keys)) if keys else None) as client:
        return await client.post(path, params={"beta": "true"}, json=body, headers=headers)


async def message(engine: Models, **body: Any) -> dict[str, Any]:
    answer = await post(engine, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    events = []
    for written in text.split("\n\n")[:-1]:
        if written.startswith(":"):
            continue
        name, data = written.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to, as Anthropic's client adds them."""
    found: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found["content"])
            found["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = found["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                block[kind] += delta[kind]
        elif event["type"] == "message_delta":
            found |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        found["content"][index]["input"] = json.loads(text)
    return found


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in found["content"]]
    return {**found, "id": "", "content": blocks}


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_sequences": ["nothing", "there"]}, "stop_sequence", "there"),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"tools": TOOLS}, "tool_use", None),
    ],
)
async def test_a_stream_adds_up_to_the_whole_message(body: dict[str, Any], reason: str, sequence: str | None) -> None:
    answer = CALL if "tools" in body else "Hello there, how are you?"
    whole = await message(calling_engine(answer), **body)
    events = events_of((await post(calling_engine(answer), stream=True, **body)).text)
    assert without_ids(joined(events)) == without_ids(whole)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


async def test_a_call_is_a_block_with_its_input() -> None:
    text, call = (await message(calling_engine(CALL), tools=TOOLS))["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": {"city": "São Paulo"}}


async def test_the_apis_own_tools_are_not_offered() -> None:
    engine = calling_engine(CALL)
    await message(engine, tools=TOOLS)
    found = await message(engine, tools=[*SEARCH, *TOOLS, {"type": "bash_20250124", "name": "bash"}])
    assert found["content"][1]["name"] == "get_weather"
    assert engine.streams[0].prompt == engine.streams[1].prompt
    assert engine.streams[0].params.grammar == engine.streams[1].params.grammar != ""
    await message(engine, tools=SEARCH)
    assert engine.streams[2].params.grammar == ""


async def test_input_that_was_cut_off_has_what_is_complete() -> None:
    found = await message(calling_engine(CALL), tools=TOOLS, stop_sequences=["Paulo"])
    assert found["content"][1]["input"] == {}
    assert found["stop_reason"] == "stop_sequence"


async def test_max_tokens_beyond_the_context_ends_with_the_context() -> None:
    engine = FakeEngine("word " * 1000)
    assert (await message(engine, max_tokens=10**6))["stop_reason"] == "model_context_window_exceeded"


async def test_usage_counts_cached_tokens_apart() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 4}
    async with LoopEngine().running() as engine:
        first, second = [(await message(engine, **body))["usage"] for _ in range(2)]
        counted = (await post(engine, "/v1/messages/count_tokens", **body)).json()
    assert counted == {"input_tokens": first["input_tokens"]} and first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


async def test_a_conversation_with_tools_has_the_prompt_of_the_same_chat() -> None:
    engine = calling_engine("Sunny.")
    turns = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sun"}]},
    ]  # fmt: skip
    await message(
        engine, system=[{"type": "text", "text": "Be brief.", "cache_control": {}}], messages=turns, tools=TOOLS
    )
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    chat = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "t1"},
    ]
    tool = {"name": "get_weather", "description": "The weather.", "parameters": CITY}
    offered = [{"type": "function", "function": tool}]
    answer = await post(engine, "/v1/chat/completions", messages=chat, tools=offered)
    assert answer.status_code == 200, answer.text
    assert engine.streams[0].prompt == engine.streams[1].prompt


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: this model reads"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: is required"),
        ({"tools": SEARCH, "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice: needs tools"),
        ({"tools": [*SEARCH, *TOOLS], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice: must name"),
        ({"tools": [*SEARCH, {"name": "a b", "input_schema": {}}]}, "tools[1].name: "),
        ({"tools": [*SEARCH, {"input_schema": {}}]}, "tools[1]: name: is required"),
        ({"tools": [{"name": "a", "strict": True, "input_schema": {"properties": {"a": {"type": "x"}}}}]},
         "tools[0].input_schema: Invalid type..., at properties.a: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"items": {"not": {"pattern": "a"}}}}}},
         'output_config.format: Unimplemented keys: ["not"]'),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice: name: "),
        ({"stop_sequences": "x"}, "stop_sequences: must be a list of strings"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens: "),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "a"}, RESULT]}, *HELLO]},
         "messages[1].content[1]: a block of type 'tool_result' belongs to a message of role 'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
         "messages[0].content[0]: a block of type 'tool_use' belongs to a message of role 'assistant'"),
    ],
)  # fmt: skip
async def test_a_bad_request_names_the_field_that_the_client_sent(body: dict[str, Any], begins: str) -> None:
    answer = await post(calling_engine("x"), **body)
    assert answer.status_code == 400
    error = answer.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == answer.headers["request-id"]
    assert error["error"]["message"].startswith(begins), error


async def test_other_errors_have_the_types_of_their_status() -> None:
    engine = calling_engine("x")
    found = {
        "not_found_error": await post(engine, model="other"),
        "authentication_error": await post(engine, keys="wrong"),
        "invalid_request_error": await post(engine, "/v1/messages", messages=3),
    }
    assert (await post(engine, keys="right")).status_code == 200
    engine.max_streams = 0
    found["rate_limit_error"] = await post(engine)
    assert {kind: answer.json()["error"]["type"] for kind, answer in found.items()} == {kind: kind for kind in found}
    assert found["rate_limit_error"].headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
async def test_thinking_is_a_block_of_its_own_unless_it_is_omitted(display: str | None, stream: bool) -> None:
    engine = calling_engine("So it is.\n</think>\n\nYes.")
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}<think>{# </think> #}"
    engine.chat_format = TemplateChatFormat(engine.tokenizer, template)
    body: dict[str, Any] = {} if display is None else {"thinking": {"type": "adaptive", "display": display}}
    answer = await post(engine, stream=stream, **body)
    assert answer.status_code == 200, answer.text
    blocks = (joined(events_of(answer.text)) if stream else answer.json())["content"]
    thoughts = [] if display == "omitted" else [("thinking", "So it is.")]
    assert [(block["type"], block[block["type"]].strip()) for block in blocks] == [*thoughts, ("text", "Yes.")]
