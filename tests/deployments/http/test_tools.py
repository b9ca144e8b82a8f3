"""Tool calls and reasoning over HTTP, in OpenAI's shapes, streamed and not."""

import json
import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from llguidance import LLMatcher

from deployments.engine.sequence_stream import SequenceStream
from deployments.openai.tool_fields import MAX_SCHEMA_DEPTH
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.registry import load_tokenizer, open_chat_format
from llama_core.text.template.chat_template import TemplateChatFormat
from llama_core.text.tools.tool import Call
from llama_core.text.tools.tool_format import find_tool_format
from tests.programs import tool_conversations
from tests.support.chat_templates import make_chat_model
from tests.support.full_runs import examples
from tests.support.model_engine import ModelEngine
from tests.support.programs import REPOSITORY
from tests.support.scripted_engine import FakeEngine, ask, calling_engine, in_process, serve, sse
from tests.support.tool_calls import FORMATS, TOOLS, random_answer

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
OFFERED = [tool.described() for tool in TOOLS]
THINKER = "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ '<think>' if add_generation_prompt }}{# </think> #}"


async def post(engine: FakeEngine, **body: Any) -> httpx.Response:
    return await ask(engine, "/v1/chat/completions", {"messages": HELLO, "seed": 5, **body})


async def choice(engine: FakeEngine, *, stream: bool = False, **body: Any) -> dict[str, Any]:
    """The answer's choice, or what the chunks of a stream add up to."""
    ask_for = tool_conversations.streamed if stream else tool_conversations.whole
    async with in_process(engine) as client:
        message, finish_reason = await ask_for(client, {"messages": HELLO, "seed": 5, **body})
    return {"message": message, "finish_reason": finish_reason}


@pytest.mark.parametrize("tool_format", FORMATS)
async def test_conversations_have_the_same_calls_streamed_and_not(tool_format: str) -> None:
    rng = random.Random(tool_format)
    for _ in range(examples(6, 20)):
        text, content, calls = random_answer(rng, tool_format)
        engine = calling_engine(text + " ", tool_format)  # the template's ending
        whole = await choice(engine, tools=OFFERED)
        parts = await choice(engine, stream=True, tools=OFFERED)
        assert parts["message"] == whole["message"] and parts["finish_reason"] == whole["finish_reason"]
        message = whole["message"]
        found = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        assert found == [(call.name, json.loads(call.arguments)) for call in calls]
        assert message["content"] == (content.lstrip() or None if calls else content.lstrip())
        assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
        ids = [call["id"] for call in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids) and all(each.startswith("call_") for each in ids)


async def test_no_tools_in_the_request_means_no_parser_and_no_grammar() -> None:
    text = find_tool_format("hermes").written_calls([Call("get-time", "{}")])
    bodies: list[dict[str, Any]] = [{}, {"tools": OFFERED, "tool_choice": "none"}, {"tools": []}]
    for body in bodies:
        engine = calling_engine(text)
        assert (await choice(engine, **body))["message"]["content"] == text
        assert engine.streams[-1].params.grammar == ""
        assert "get_weather" not in engine.tokenizer.decode(engine.streams[-1].prompt)


async def test_functions_are_answered_in_their_older_form() -> None:
    engine = calling_engine(find_tool_format("hermes").written_calls([Call("get-time", "{}")]))
    functions = [tool["function"] for tool in OFFERED]
    whole = await choice(engine, functions=functions, function_call="auto")
    assert whole["message"]["function_call"] == {"name": "get-time", "arguments": "{}"}
    assert whole["finish_reason"] == "function_call" and "tool_calls" not in whole["message"]
    chunks = sse((await post(engine, functions=functions, stream=True)).text)
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert "".join(delta.get("name", "") for delta in deltas) == "get-time"
    assert "".join(delta.get("arguments", "") for delta in deltas) == "{}"
    assert engine.streams[-1].params.grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_and_its_tokens_are_counted(stream: bool) -> None:
    call = find_tool_format("hermes").written_calls([Call("get-time", "{}")])
    engine = calling_engine("So, <tool_call> it is.\n</think>\n\n" + call)
    engine.chat_format = TemplateChatFormat(engine.tokenizer, THINKER)
    found = await choice(engine, stream=stream, tools=OFFERED)
    assert found["message"]["reasoning_content"] == "So, <tool_call> it is."
    assert found["message"]["tool_calls"][0]["function"]["name"] == "get-time"
    usage = (await post(engine)).json()["usage"]
    num_tokens = len(engine.tokenizer.encode("So, <tool_call> it is.\n</think>", bos=False, eos=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


class MarkedEngine(FakeEngine):
    """Its answer's marks are control tokens."""

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return self.tokenizer.encode_special(self.answer)


@pytest.fixture(scope="module")
def harmony_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model("harmony", tmp_path_factory.mktemp("harmony"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<|start|>assistant<|channel|>final<|message|>Yes, <b>.", "Yes, <b>.", []),
        ("<|start|>assistant<|channel|>commentary to=functions.get-time <|constrain|>json<|message|>{}", None, ["get-time"]),
        ("<|start|>assistant to=functions.get-time<|channel|>commentary json<|message|>{}", None, ["get-time"]),
        ("<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get-time"
         "<|channel|>commentary json<|message|>{}", "I look.", ["get-time"]),
    ],
)  # fmt: skip
async def test_messages_of_harmony_are_reasoning_answer_and_calls(
    stream: bool, text: str, content: str | None, calls: list[str], harmony_model: Path
) -> None:
    thought = "<|channel|>analysis<|message|>So, it is.<|end|>"
    engine = MarkedEngine(thought + text)
    engine.max_seq_len, engine.max_request_tokens = 8192, 10**6
    engine.tokenizer = load_tokenizer(harmony_model / "tokenizer.json")
    engine.chat_format = open_chat_format("auto", engine.tokenizer, harmony_model)
    found = (await choice(engine, stream=stream, tools=OFFERED))["message"]
    assert found["reasoning_content"] == "So, it is." and found["content"] == content
    assert [call["function"]["name"] for call in found.get("tool_calls", ())] == calls
    usage = (await post(engine, tools=OFFERED)).json()["usage"]
    num_tokens = len(engine.tokenizer.encode_special(thought))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    plain = (await choice(engine, stream=stream))["message"]  # without tools
    written = [f"<|channel|>commentary to=functions.{name}<|message|>{{}}" for name in calls]
    assert plain["reasoning_content"] == "So, it is." and plain["content"] == "".join([content or "", *written])


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_where_the_request_says_so_but_counted(stream: bool) -> None:
    engine = calling_engine("So, it is.\n</think>\n\nYes.")
    engine.chat_format = TemplateChatFormat(engine.tokenizer, THINKER)
    found = await choice(engine, stream=stream, include_reasoning=False)
    assert found["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    shown = await choice(engine, stream=stream, include_reasoning=True)
    assert "So, it is." in shown["message"].values()
    assert (await post(engine, include_reasoning=False)).json()["usage"] == (await post(engine)).json()["usage"]


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(MAX_SCHEMA_DEPTH):
    DEEP = {"properties": DEEP}
SLOW = {"name": "a", "strict": True, "parameters": {"properties": {"n": {"multipleOf": 99_999_989}}}}
NOT_AN_OBJECT = {"name": "a", "parameters": {"type": "array"}}
CALLED: dict[str, Any] = {"id": "c", "function": {"name": "f"}}
BAD_ARGUMENTS = {"id": "c", "function": {"name": "f", "arguments": [1]}}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
NAME = "messages[0].tool_calls[0].function.name"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": NOT_AN_OBJECT}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": SLOW}]}, "tools[0].function.parameters"),
        ({"tools": [OFFERED[0], OFFERED[0]]}, "tools"),
        ({"tools": OFFERED, "tool_choice": "any"}, "tool_choice"),
        ({"tools": OFFERED, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "g"}}, "function_call"),
        ({"tools": OFFERED, "functions": [OFFERED[0]["function"]]}, "functions"),
        ({"tools": OFFERED, "tool_choice": "required", "function_call": "none"}, "function_call"),
        ({"tools": OFFERED, "structured_outputs": {"regex": ".*"}}, "structured_outputs.regex"),
        ({"tools": OFFERED, "structured_outputs": {"choice": ["a", "<b"]}}, "structured_outputs.choice"),
        ({"tools": OFFERED, "tool_choice": "required", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALLED]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [BAD_ARGUMENTS]}]}, ARGUMENTS),
        ({"messages": [{"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "a b"}}]}]}, NAME),
    ],
)  # fmt: skip
async def test_a_bad_field_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    answer = await post(calling_engine("x"), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("tool_format", "kind"), [("llama3_json", "object"), ("pythonic", "array"), ("mistral", "array")]
)
async def test_a_schema_whose_answers_begin_as_calls_do_is_refused_beside_tools(tool_format: str, kind: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": ["null", kind]}}}
    answer = await post(calling_engine("x", tool_format), tools=OFFERED, response_format=wanted)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert (await post(calling_engine("null", "hermes"), tools=OFFERED, response_format=wanted)).status_code == 200


async def test_a_tool_whose_schema_cannot_be_followed_is_400_and_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}}
    answer = await post(calling_engine("x"), tools=[*OFFERED, tool])
    place = "tools[3].function.parameters"
    assert answer.json()["error"]["param"] == place
    assert answer.json()["error"]["message"].startswith(
        f'{place}: Unimplemented keys: ["uniqueItems"], at properties.a: '
    )
    chosen = {"type": "function", "function": {"name": "a"}}
    answer = await post(calling_engine("x"), tools=[*OFFERED, tool], tool_choice=chosen)
    assert answer.json()["error"]["param"] == place  # as the client counts
    answer = await post(calling_engine("x"), functions=[*(each["function"] for each in OFFERED), tool["function"]])
    assert answer.json()["error"]["param"] == "functions[3].parameters"


def offered(parameters: Any, name: str = "broken", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z]+@[a-z]+$"}, "at properties.a.properties.b"),
        ({"type": "string", "pattern": r"\bfoo\b"}, "at properties.a.properties.b"),
        ({"type": "string", "pattern": r"^(a|b)\1$"}, "at properties.a.properties.b"),
        ({"type": "string", "pattern": "^[^]+$"}, "at properties.a.properties.b"),
        ({"type": "array", "items": {"type": "float"}}, "at properties.a.properties.b.items"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/none"}]}, "at properties.a.properties.b.anyOf.1"),
        ({"$ref": "#/$defs/Wrong"}, "at $defs.Wrong.properties.c?d"),
        ({"type": "string", "minLength": "3"}, "at properties.a.properties.b"),
        ({"multipleOf": 99_999_989}, "at properties.a.properties.b"),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_any_object_unless_it_must_be_followed(
    part: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"Wrong": {"type": "object", "properties": {"c d": {"type": "text"}}}} if "$ref" in part else {}
    schema = {"type": "object", "$defs": wrong, "properties": {"a": {"type": "object", "properties": {"b": part}}}}
    engine = calling_engine("x")
    for _ in range(2):
        assert (await post(engine, tools=[*OFFERED, offered(schema)])).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("the arguments of tool broken may be any object: ")
    vocabulary = grammar_vocabulary(engine.tokenizer, engine.tokenizer.stop_ids)
    for call, is_allowed in (
        (Call("broken", '{"z": [1], "a": 2}'), True),
        (Call("broken", "[1]"), False),
        (Call("get_weather", '{"city": 3}'), False),  # the schemas of the other tools are followed
        (Call("get_weather", '{"city": "Rome"}'), True),
    ):
        matcher = LLMatcher(vocabulary, engine.streams[-1].params.grammar, log_level=0)
        ids = engine.tokenizer.encode(find_tool_format("hermes").written_calls([call]), bos=False, eos=False)
        assert (matcher.try_consume_tokens(ids) == len(ids)) is is_allowed, call
    for fields in ({"tools": [offered(schema, strict=True)]}, {"tools": [offered(schema)], "tool_choice": "required"}):
        error = (await post(engine, **fields)).json()["error"]
        assert error["param"] == "tools[0].function.parameters" and place in error["message"], error


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "parameters",
    [None, {}, [], {"type": "object"}, {"type": "object", "properties": {}}, {"type": "object", "properties": None},
     {"type": None, "required": None, "properties": []}, {"type": ["object", "null"], "additionalProperties": None}],
    ids=json.dumps,
)  # fmt: skip
async def test_a_tool_without_arguments_passes_however_it_is_written(parameters: Any, choice: str) -> None:
    tools = [offered(parameters, "now"), {"type": "function", "function": {"name": "absent"}}]
    assert (await post(calling_engine("x"), tools=tools, tool_choice=choice)).status_code == 200


async def test_the_schemas_and_the_limit_of_opencode_are_followed() -> None:
    """As opencode 1.18 writes them, whatever context there is."""
    bounds = {"minimum": -9007199254740991, "exclusiveMinimum": 0, "maximum": 9007199254740991}
    properties = {"command": {"type": "string"}, "timeout": {"type": "integer", "description": "d", **bounds}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties}
    written = find_tool_format("hermes").written_calls([Call("bash", '{"command": "ls", "timeout": 5}')])
    engine = calling_engine(written)
    body: dict[str, Any] = {
        "tools": [offered(schema | {"required": ["command"]}, "bash", strict=True)],
        "max_tokens": 32000,
    }
    found = await choice(engine, stream=True, **body)
    assert json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls", "timeout": 5}
    assert engine.streams[-1].params.max_tokens == engine.max_seq_len - len(engine.streams[-1].prompt)


async def test_keywords_that_are_null_are_absent() -> None:
    """As Go and Java write empty lists and dictionaries; null stays a value."""
    inner = {"type": "string", "enum": None, "minLength": None, "description": None}
    schema = {"type": "object", "$defs": None, "required": None, "properties": {"a": inner, "b": {"const": None}}}
    engine = calling_engine("x")
    assert (await post(engine, tools=[offered(schema, strict=True)])).status_code == 200
    prompt = engine.tokenizer.decode(engine.streams[-1].prompt)
    assert '"properties": {"a": {"type": "string"}, "b": {"const": null}}' in prompt and '"required"' not in prompt


@pytest.mark.parametrize("tool_format", FORMATS)
async def test_names_of_other_servers_tools_pass_and_are_called(tool_format: str) -> None:
    for name in ("github/search", "server.tool", "ns:tool"):
        engine = calling_engine(find_tool_format(tool_format).written_calls([Call(name, '{"q": 1}')]), tool_format)
        tools = [offered({"type": "object", "properties": {"q": {"type": "integer"}}}, name)]
        named = {"type": "function", "function": {"name": name}}
        assert (await choice(engine, tools=tools, tool_choice=named))["message"]["tool_calls"][0]["function"] == {
            "name": name,
            "arguments": '{"q": 1}',
        }


SEEDS = pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.full)], ids=str)


class LongContext(ModelEngine):
    max_seq_len = 8192


@pytest.fixture(scope="module")
def model() -> ModelEngine:
    return LongContext()


@SEEDS
@pytest.mark.parametrize("tool_format", FORMATS)
async def test_a_real_model_holds_conversations_with_tools(tool_format: str, seeds: range, model: ModelEngine) -> None:
    """A model that was never trained to call tools: only the grammar makes its calls valid."""
    model.tool_format = tool_format
    counts = Counter[str]()
    async with in_process(model) as client:
        for seed in seeds:
            assert await tool_conversations.converse(client, tool_format, seed, counts) == []
    assert counts["calls"]


def test_the_agent_of_the_examples_offers_both_tools_twice_and_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    format_ = find_tool_format("hermes")
    calls = [Call("get_weather", '{"city": "Oslo"}'), Call("translate", '{"word": "fox", "language": "Italian"}')]
    answers = [*(format_.written_calls([call]) for call in calls), "It is sunny."]
    engine = calling_engine("")
    submit = engine.submit

    async def next_answer(*args: Any, **options: Any) -> list[SequenceStream]:
        engine.answer = answers.pop(0)
        return await submit(*args, **options)

    monkeypatch.setattr(engine, "submit", next_answer)
    with serve(engine) as served:
        monkeypatch.setattr(sys, "argv", ["agent_openai.py", "--base-url", served.url])
        runpy.run_path(str(REPOSITORY / "examples" / "agent_openai.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[1:] == [
        'assistant calls get_weather({"city": "Oslo"})',
        "get_weather: sunny, 24 degrees",
        'assistant calls translate({"word": "fox", "language": "Italian"})',
        "translate: fox is 'volpe' in Italian",
        "user: Write one sentence about the weather in Rome.",
        "assistant: It is sunny.",
    ]
    *choosing, answering = [engine.tokenizer.decode(stream.prompt) for stream in engine.streams]
    assert all('"name": "translate"' in prompt and '"name": "get_weather"' in prompt for prompt in choosing)
    assert "24 degrees" in answering and "volpe" in answering


@pytest.mark.parametrize("tool_format", FORMATS)
async def test_a_named_function_is_called_exactly_once(tool_format: str, model: ModelEngine) -> None:
    """As by OpenAI's and vLLM's servers; without a name there may be several calls."""
    by_name = {"name": "f"}
    function = {**by_name, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    named = {"type": "function", "function": by_name}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "max_tokens": 400}
    flat = {"tools": [{"type": "function"} | function], "tool_choice": {"type": "function"} | by_name}
    inputs = {"tools": [by_name | {"input_schema": function["parameters"]}], "tool_choice": {"type": "tool"} | by_name}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", tools | {"tool_choice": named}),
        ("chat/completions", {"functions": [function], "function_call": by_name}),
        ("responses", {"input": "x"} | flat),
        ("messages", {"max_tokens": 400} | inputs),
        ("chat/completions", tools | {"tool_choice": "required", "parallel_tool_calls": False}),
        ("chat/completions", tools | {"tool_choice": "required"}),
        ("chat/completions", tools | {"tool_choice": allowed}),
    ]
    engine = calling_engine(find_tool_format(tool_format).written_calls([Call("f", "{}")]), tool_format)
    for path, body in asked:
        hello = {} if path == "responses" else {"messages": HELLO}
        assert (await ask(engine, f"/v1/{path}", body | hello)).status_code == 200
    grammars = [stream.params.grammar for stream in engine.streams]
    assert len(set(grammars[:5])) == len(set(grammars[5:])) == 1 and grammars[0] != grammars[6]
    model.tool_format = tool_format
    (_,) = (await choice(model, **tools, tool_choice=named, temperature=1))["message"]["tool_calls"]


@SEEDS
@pytest.mark.parametrize("tool_format", FORMATS)
async def test_beside_tools_a_real_model_answers_by_the_schema_or_calls(
    tool_format: str, seeds: range, model: ModelEngine
) -> None:
    model.tool_format = tool_format
    properties = {"flag": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}}
    schema = {"type": "object", "properties": properties, "required": ["flag", "kind"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    fields: dict[str, Any] = {"tools": offered, "response_format": wanted, "parallel_tool_calls": False}
    fields |= {"temperature": 1, "max_tokens": 300}
    for seed in seeds:
        whole, parts = [(await choice(model, stream=each, **fields, seed=seed))["message"] for each in (False, True)]
        assert parts.get("content") == whole["content"]
        calls = whole.get("tool_calls") or []
        for text in [call["function"]["arguments"] for call in calls] or [whole["content"]]:
            jsonschema.validate(json.loads(text), schema)
    called = await choice(model, **fields, tool_choice="required")
    assert called["message"]["tool_calls"] and called["finish_reason"] == "tool_calls"
