"""OpenAI's responses through its own client: text, tools, events, and what the server refuses."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deployments.http.limits import HttpLimits
from tests.support.scripted_engine import MODEL_ID, FakeEngine, Served, serve

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "description": "The weather.", "parameters": CITY}]
SEARCH: list[Any] = [{"type": "web_search", "external_web_access": False, "defer_loading": True}]
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "time", "description": "Of time.", "tools": [
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "grep"},
]}  # fmt: skip
CALL = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = "Hello there, how are you?"


@pytest.fixture
def served() -> Iterator[Served]:
    engine = FakeEngine(TEXT)
    engine.max_seq_len = 4096
    engine.tool_format = "hermes"
    with serve(engine, HttpLimits()) as running:
        yield running


def client(served: Served) -> Any:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0).responses


def create(served: Served, **fields: Any) -> Any:
    return client(served).create(**{"model": MODEL_ID, "input": "Hello"} | fields)


def outputs(response: Any) -> list[dict[str, Any]]:
    items = [item.to_dict() for item in response.output]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_response_is_complete_and_repeats_the_request(served: Served) -> None:
    response = create(
        served, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, store=False, max_tool_calls=3
    )
    assert (response.status, response.output_text, response.error) == ("completed", TEXT, None)
    assert (response.instructions, response.temperature, response.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert (response.store, response.max_tool_calls) == (False, 3)
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(served.engine.streams[0].prompt)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


def test_an_answer_at_its_limit_is_incomplete(served: Served) -> None:
    response = create(served, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert outputs(response)[0]["status"] == "incomplete"


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 4}, {"tools": TOOLS}])
def test_the_last_event_has_what_the_events_add_up_to(served: Served, fields: dict[str, Any]) -> None:
    served.engine.answer = CALL if "tools" in fields else TEXT
    whole = create(served, **fields)
    events = list(create(served, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert outputs(events[-1].response) == outputs(whole)
    assert {event.content_index for event in events if hasattr(event, "content_index")} == {0}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in events[-1].response.output]
    texts = {event.item_id: "" for event in events if hasattr(event, "delta")}
    for event in events:
        if hasattr(event, "delta"):
            texts[event.item_id] += event.delta
    assert [texts[item.id] for item in done] == [
        item.arguments if item.type == "function_call" else item.content[0].text for item in done
    ]


def test_a_call_is_an_item_and_its_output_goes_into_the_next_prompt(served: Served) -> None:
    served.engine.answer = CALL
    first = create(served, tools=TOOLS)
    call = first.output[1]
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "Rome"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    create(served, tools=TOOLS, input=[{"role": "user", "content": "Hello"}, *first.output, result])
    prompt = served.engine.tokenizer.decode(served.engine.streams[-1].prompt)
    assert "Let me look." in prompt
    assert prompt.index("Rome") < prompt.index("sunny")


def test_tools_that_the_server_cannot_run_are_not_offered(served: Served) -> None:
    others = [*SEARCH, {"type": "custom", "name": "grep", "format": {"type": "text"}}, {"type": "image_generation"}]
    served.engine.answer = CALL
    create(served, tools=TOOLS)
    found = create(served, tools=[*others, *TOOLS])
    assert [tool.type for tool in found.tools] == ["function"] and found.output[1].name == "get_weather"
    assert served.engine.streams[0].prompt == served.engine.streams[1].prompt
    assert served.engine.streams[0].params.grammar == served.engine.streams[1].params.grammar != ""
    create(served, tools=others)
    assert served.engine.streams[2].params.grammar == ""


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "now", "namespace": "time"}])
def test_a_function_of_a_namespace_is_called_by_namespace_and_name(served: Served, choice: Any) -> None:
    """As the Codex CLI takes it: under the joined name, it knows no such function."""
    served.engine.answer = '<tool_call>\n{"name": "time__now", "arguments": {}}\n</tool_call>'
    fields: dict[str, Any] = {"tools": [*TOOLS, NAMESPACE], "tool_choice": choice}
    whole = create(served, **fields)
    done = list(create(served, stream=True, **fields))[-1].response
    for response in (whole, done):
        (call,) = response.output
        assert (call.namespace, call.name, call.arguments) == ("time", "now", "{}")
    assert [tool.type for tool in whole.tools] == ["function", "namespace"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    create(served, tools=fields["tools"], input=[{"role": "user", "content": "Hello"}, *whole.output, result])
    assert '"name": "time__now"' in served.engine.tokenizer.decode(served.engine.streams[-1].prompt)


def test_what_the_server_does_not_do_is_accepted_where_it_changes_no_answer(served: Served) -> None:
    response = create(served, store=True, truncation="auto", text={"verbosity": "low"})
    assert (response.store, response.truncation, response.output_text) == (True, "disabled", TEXT)


def test_text_format_becomes_the_grammar(served: Served) -> None:
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    response = create(served, text={"format": form})
    assert served.engine.streams[-1].params.grammar
    assert response.text.format.name == "city"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"background": True}, "background: this server stores no responses: leave it out or send false"),
        ({"input": [{"type": "item_reference"}]}, "input[0]: must have an id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type: this model reads"),
        ({"input": [{"type": "reasoning", "summary": 5}, {"role": "user", "content": "a"}]}, "input[0].summary: must be"),
        ({"tools": SEARCH, "tool_choice": {"type": "web_search"}}, "tool_choice: must be none, auto, required, or"),
        ({"tools": [*SEARCH, *TOOLS], "tool_choice": {"type": "function", "name": "web_search"}}, "tool_choice: must name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type: "),
        ({"tools": [*SEARCH, NAMESPACE, {"type": "function", "name": "time__now"}]}, "tools: each function must have a name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name: "),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format: schema: is required"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"items": {"not": {"pattern": "a"}}}}}},
         'text.format: Unimplemented keys: ["not"]'),
        ({"tools": [{"type": "function", "name": "a", "strict": True, "parameters": {"properties": {"function": {"type": "x"}}}}
         ]}, "tools[0].parameters: Invalid type..., at properties.function: "),
        ({"truncation": "auto", "input": "x " * 5000}, "input: Input tokens exceed the configured limit of 4095 tokens"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_the_reason(served: Served, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(served, **fields)
    assert caught.value.body["message"].startswith(message), caught.value.body
