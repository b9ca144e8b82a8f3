"""A dialog may have every answer that this server or another one gave: reasoning alone, refusals, calls that were cut off."""

import json
import random
from typing import Any

import httpx
import pytest

from deployments.openai.field_types import NOT_TEXT
from llama_core.text.template.chat_template import TemplateChatFormat
from llama_core.text.tools.tool import Call
from llama_core.text.tools.tool_format import find_tool_format
from tests.support.scripted_engine import FakeEngine, ask, calling_engine, sse
from tests.support.tool_calls import FORMATS, TOOLS

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
AGAIN: list[Any] = [{"role": "user", "content": "Go on"}]
EMPTY = {"role": "assistant", "content": ""}
OFFERED = [tool.described() for tool in TOOLS]
WRITES_REASONING = (
    "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }}\n{% endfor %}"
    "{{ '<think>' if add_generation_prompt }}{# </think> #}"
)


async def post(engine: FakeEngine, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return await ask(engine, path, body)


async def prompt_of(engine: FakeEngine, *earlier: dict[str, Any]) -> str:
    answer = await post(engine, messages=[*HELLO, *earlier, *AGAIN])
    assert answer.status_code == 200, answer.text
    return engine.tokenizer.decode(engine.streams[-1].prompt)


def thinker() -> FakeEngine:
    engine = calling_engine("So it is.\n</think>\n\nYes.")
    engine.chat_format = TemplateChatFormat(engine.tokenizer, WRITES_REASONING)
    return engine


def calling(arguments: str | None) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("tool_format", FORMATS)
async def test_a_dialog_may_have_a_call_that_was_cut_off_anywhere(tool_format: str) -> None:
    arguments = {"city": 'São "P" 😀', "days": [1, 25], "exact": True}
    text = find_tool_format(tool_format).written_calls([Call("get_weather", json.dumps(arguments))])
    engine = calling_engine(text, tool_format)
    num_tokens = len(engine.tokenizer.encode(text, bos=False, eos=False))
    num_cut = 0
    for max_tokens in random.Random(7).sample(range(1, num_tokens), min(24, num_tokens - 1)):
        answer = await post(engine, messages=HELLO, tools=OFFERED, max_tokens=max_tokens)
        message = answer.json()["choices"][0]["message"]
        if calls := message.get("tool_calls"):
            num_cut += 1
            await prompt_of(engine, message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Cut off."})
    assert num_cut > 5


@pytest.mark.parametrize(
    ("cut_off", "completed"),
    [
        ('{"city": "Ro', {"city": "Ro"}),
        ('{"city": "Rome", "da', {"city": "Rome"}),
        ('{"city": "Rome", "days": [1, 2', {"city": "Rome", "days": [1, 2]}),
        ('{"city": "x\\ud83d', {"city": "x"}),
        ('{"city":', {}),
        (None, {}),
        ("null", {}),
    ],
)
async def test_arguments_that_were_cut_off_are_completed_in_the_prompt(cut_off: str | None, completed: Any) -> None:
    engine = calling_engine("x")
    assert await prompt_of(engine, calling(cut_off)) == await prompt_of(engine, calling(json.dumps(completed)))


NO_OBJECTS = ["x", "[1", '{"city" 1', '{"city": "Rome"} more', "1", "[1]", '{"a":' * 300, '{"a": "' + 70_000 * "x"]


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda text: text[:12])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_arguments_that_are_no_object_stay_text_in_the_prompt(path: str, arguments: str) -> None:
    """One bad call of a model must not refuse all later turns."""
    engine = calling_engine("x")
    engine.max_seq_len = engine.max_request_tokens = 2**17
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments}
    items = [*HELLO, call, *AGAIN]
    asks: dict[str, Any] = (
        {"input": items} if path == "/v1/responses" else {"messages": [*HELLO, calling(arguments), *AGAIN]}
    )
    answer = await post(engine, path, **asks)
    assert answer.status_code == 200, answer.text
    assert json.dumps(arguments) in engine.tokenizer.decode(engine.streams[-1].prompt)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_an_answer_of_reasoning_alone_is_in_the_prompt_under_either_name(name: str) -> None:
    prompt = await prompt_of(thinker(), {"role": "assistant", "content": None, name: "Let me see."})
    assert "assistant Let me see. \n" in prompt


@pytest.mark.parametrize(
    "refused",
    [
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
        {"refusal": "I cannot."},
    ],
)
async def test_a_refusal_is_the_text_of_its_answer(refused: dict[str, Any]) -> None:
    engine = calling_engine("x")
    plain = await prompt_of(engine, {"role": "assistant", "content": "I cannot."})
    assert await prompt_of(engine, {"role": "assistant", **refused}) == plain


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user"}, ""),
        ({"role": "user", "content": None, "reasoning": "x"}, ""),
        ({"role": "user", "content": None, "refusal": "x"}, ""),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}, "[0].refusal"),
    ],
)
async def test_a_message_without_anything_is_refused(message: dict[str, Any], place: str) -> None:
    answer = await post(calling_engine("x"), messages=[*HELLO, message, *AGAIN])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].content" + place)


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": None, "tool_calls": []}, {"content": ""}])
async def test_an_answer_without_content_is_an_empty_one(nothing: dict[str, Any]) -> None:
    engine = calling_engine("x")
    assert await prompt_of(engine, {"role": "assistant", **nothing}) == await prompt_of(engine, EMPTY)
    if "tool_calls" not in nothing:
        items = [*HELLO, {"role": "assistant", **nothing}, *AGAIN]
        assert (await post(engine, "/v1/responses", input=items)).status_code == 200
        assert engine.streams[-1].prompt == engine.streams[0].prompt


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]
)
async def test_an_image_in_the_result_of_a_tool_becomes_a_text(path: str) -> None:
    """Agents send screenshots. In a message of the user an image is refused: the user asks about it."""
    engine = calling_engine("x")
    texts = ["Here it is."] + (["image"] if path != "/v1/responses" else ["input_image", "input_file"])
    parts = [{"type": "text", "text": texts[0]}, *({"type": kind, "source": {}} for kind in texts[1:])]
    parts += [{"type": "another_text", "text": "Kept."}]
    by_user = [{"role": "user", "content": parts}]
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c1", "output": parts}
        asks: list[dict[str, Any]] = [{"input": [*HELLO, call, result]}, {"input": by_user}]
    elif path.startswith("/v1/messages"):
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}
        block = {"type": "tool_result", "tool_use_id": "c1", "content": parts}
        messages = [*HELLO, use, {"role": "user", "content": [block]}]
        asks = [{"messages": messages, "max_tokens": 5}, {"messages": by_user, "max_tokens": 5}]
    else:
        asks = [{"messages": [*HELLO, calling("{}"), {"role": "tool", "tool_call_id": "c1", "content": parts}]}]
        asks.append({"messages": by_user})
    taken, refused = [await post(engine, path, **body) for body in asks]
    assert taken.status_code == 200, taken.text
    assert refused.status_code == 400 and "text" in refused.text
    if engine.streams:
        prompt = engine.tokenizer.decode(engine.streams[-1].prompt)
        assert prompt.count(NOT_TEXT) == len(texts) - 1 and prompt.index(texts[0]) < prompt.index(NOT_TEXT)
        assert "Kept." in prompt


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_an_image_of_an_earlier_turn_becomes_a_text_and_one_of_the_last_is_refused(path: str) -> None:
    kind = {"/v1/responses": "input_image", "/v1/messages": "image"}.get(path, "image_url")
    asked = {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": kind, "source": {"type": "base64"}}]}
    field = "input" if path == "/v1/responses" else "messages"
    limit = {"max_tokens": 5} if path == "/v1/messages" else {}
    engine = calling_engine("x")
    answer = await post(engine, path, **{field: [asked, {"role": "assistant", "content": "A cat."}, *AGAIN]}, **limit)
    assert answer.status_code == 200, answer.text
    if path != "/tokenize":
        assert f"See\n{NOT_TEXT}" in engine.tokenizer.decode(engine.streams[-1].prompt)
    for messages in ([asked], [*HELLO, {"role": "assistant", "content": "Hi."}, asked]):
        error = (await post(engine, path, **{field: messages}, **limit)).json()["error"]
        place = f"{field}[{len(messages) - 1}].content[1].type: "
        assert error["message"].startswith(place) and "image" in error["message"]


async def test_thinking_parts_are_the_reasoning_of_their_answer() -> None:
    parts = [
        {"type": "thinking", "thinking": "Let me see."},
        {"type": "text", "text": "Yes."},
        {"type": "redacted_thinking"},
    ]
    assert "assistant Let me see. Yes.\n" in await prompt_of(thinker(), {"role": "assistant", "content": parts})


@pytest.mark.parametrize("call_id", ["", None])
async def test_calls_may_have_no_id_and_arguments_that_are_an_object(call_id: str | None) -> None:
    engine = calling_engine("x")
    call: dict[str, Any] = {"id": call_id, "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    result = {"role": "tool", "tool_call_id": "", "content": "sun"}
    prompt = await prompt_of(engine, {"role": "assistant", "content": None, "tool_calls": [call]}, result)
    assert prompt == await prompt_of(engine, calling('{"city": "Rome"}'), result | {"tool_call_id": "c1"})
    item = {"type": "function_call", "call_id": "", "name": "get_weather", "arguments": {"city": "Rome"}}
    output = {"type": "function_call_output", "call_id": "", "output": "sun"}
    assert (await post(engine, "/v1/responses", input=[*HELLO, item, output, *AGAIN])).status_code == 200
    assert engine.tokenizer.decode(engine.streams[-1].prompt) == prompt


@pytest.mark.parametrize(("given", "arguments"), [(None, "{}"), ("x", "x"), ('{"city": "Rome"}', '{"city": "Rome"}')])
async def test_the_input_of_a_messages_call_may_be_null_or_text(given: str | None, arguments: str) -> None:
    engine = calling_engine("x")
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": given}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sun"}
    messages = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}, *AGAIN]
    assert (await post(engine, "/v1/messages", messages=messages, max_tokens=5)).status_code == 200
    told = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    assert engine.tokenizer.decode(engine.streams[-1].prompt) == await prompt_of(engine, calling(arguments), told)


async def test_blocks_of_the_apis_own_tools_are_left_out_and_documents_and_summaries_are_texts() -> None:
    engine = calling_engine("x")
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "s",
        "content": [{"type": "web_search_result", "url": "u"}],
    }
    answered = [search, found, {"type": "compaction", "content": "So far."}, {"type": "text", "text": "Yes."}]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The text."}}
    messages = [*HELLO, {"role": "assistant", "content": answered}, {"role": "user", "content": [document]}]
    assert (await post(engine, "/v1/messages", messages=messages, max_tokens=5)).status_code == 200
    plain = [*HELLO, {"role": "assistant", "content": "So far.\nYes."}, {"role": "user", "content": "The text."}]
    assert (await post(engine, messages=plain)).status_code == 200
    assert engine.streams[0].prompt == engine.streams[1].prompt
    items = [*HELLO, {"type": "compaction", "encrypted_content": "x"}, *AGAIN]
    assert (await post(engine, "/v1/responses", input=items)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_both_names_in_answers(stream: bool) -> None:
    answer = await post(thinker(), messages=HELLO, stream=stream)
    written = sse(answer.text) if stream else [answer.json()]
    parts = [each["choices"][0]["delta" if stream else "message"] for each in written]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(part.get(name, "") for part in parts) == "So it is."
    assert "".join(part.get("content") or "" for part in parts) == "Yes."
