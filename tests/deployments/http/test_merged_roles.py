"""Chats whose roles do not alternate are answered over HTTP where the chat format can say them merged."""

from typing import Any

import httpx
import pytest

from llama_core.errors import InvalidDialog
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.support.scripted_engine import FakeEngine, ask


def system(text: str) -> Any:
    return {"role": "system", "content": text}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def assistant(text: str) -> Any:
    return {"role": "assistant", "content": text}


async def post(engine: FakeEngine, messages: list[Any]) -> httpx.Response:
    return await ask(engine, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ([system("a"), system("b"), user("c")], [system("a\n\nb"), user("c")]),
        ([system("a"), {"role": "developer", "content": "b"}, user("c")], [system("a\n\nb"), user("c")]),
        ([user("a"), user("b")], [user("a\n\nb")]),
        ([user("a"), assistant("b"), assistant("c"), user("d")], [user("a"), assistant("b\n\nc"), user("d")]),
        ([user(""), user("b")], [user("b")]),
    ],
)
async def test_neighbours_of_one_role_are_one_message(sent: list[Any], meant: list[Any]) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidDialog):
        engine.chat_format.encode(sent)
    answer = await post(engine, sent)
    assert answer.status_code == 200, answer.text
    assert engine.streams[-1].prompt == engine.chat_format.encode(meant)


async def test_what_the_format_cannot_say_is_refused_with_the_index_that_was_sent() -> None:
    engine = FakeEngine()
    for sent, index in (
        ([user("a"), user("b"), system("late"), user("c")], 2),
        ([assistant("a"), assistant("b"), user("c")], 0),
        ([system("a"), system("b"), user("c"), user("d"), assistant("e")], 4),
    ):
        error = (await post(engine, sent)).json()["error"]
        assert error["code"] == "invalid_dialog"
        assert error["param"] == f"messages[{index}]"
        assert error["message"].startswith(f"messages[{index}]: role must be")


async def test_a_template_that_takes_the_messages_gets_them_as_they_are() -> None:
    engine = FakeEngine()
    engine.chat_format = TemplateChatFormat(engine.tokenizer, "{% for m in messages %}({{ m.content }}){% endfor %}")
    assert (await post(engine, [user("a"), user("b")])).status_code == 200
    assert engine.tokenizer.decode(engine.streams[-1].prompt) == "(a)(b)"


async def test_tags_made_by_a_merge_are_refused() -> None:
    error = (await post(FakeEngine(), [user("<<SYS>>"), user("b")])).json()["error"]
    assert error["code"] == "special_tags"


ONE_CALL = (
    "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one at once') }}{% endif %}"
    "|{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
)


def calling(content: str, *names: str) -> Any:
    calls = [{"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(name: str) -> Any:
    return {"role": "tool", "content": f"of {name}", "tool_call_id": f"id_{name}"}


async def test_a_template_that_takes_one_call_a_message_gets_each_with_its_result() -> None:
    engine = FakeEngine()
    engine.chat_format = TemplateChatFormat(engine.tokenizer, ONE_CALL)
    for results in ([result("g"), result("f")], [result("f"), result("g")]):
        sent = [
            user("hi"),
            calling("Both.", "f", "g") | {"reasoning_content": "Hm. "},
            *results,
            calling("", "f"),
            result("f"),
            user("so?"),
        ]
        assert (await post(engine, sent)).status_code == 200
        assert engine.tokenizer.decode(engine.streams[-1].prompt) == (
            "|user: hi|assistant: Hm. Both.f{}|tool: of f|assistant: g{}|tool: of g|assistant: f{}|tool: of f|user: so?"
        )


FUNCTION: Any = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = {"tools": [{"type": "function", "function": FUNCTION}]}
FLAT: Any = {"tools": [{"type": "function", **FUNCTION}]}
TAG = user("[INST]")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, TOOLS | {"messages": [TAG]}, "messages[0]"),
        (CHAT, TOOLS | {"messages": [system("a"), TAG]}, "messages[1]"),
        (CHAT, TOOLS | {"messages": [user("a"), assistant("b")]}, "messages[1]"),
        (CHAT, TOOLS | {"messages": [user("a"), assistant("b"), user("c"), user("d"), system("e")]}, "messages[4]"),
        (
            CHAT,
            TOOLS | {"messages": [user("a"), calling("", "f"), result("f"), user("b"), assistant("c")]},
            "messages[4]",
        ),
        (MESSAGES, {"system": "a", "messages": [TAG]}, "messages[0]"),
        (MESSAGES, {"system": "[INST]", "messages": [user("a")]}, "system"),
        (RESPONSES, {"input": "[INST]", "instructions": "a"}, "input[0]"),
        (RESPONSES, {"input": "a", "instructions": "[INST]"}, "instructions"),
        (RESPONSES, FLAT | {"input": [user("a"), assistant("b")]}, "input[1]"),
    ],
)
async def test_errors_name_the_message_that_was_sent_beside_system_messages_of_the_server(
    path: str, body: Any, place: str
) -> None:
    engine = FakeEngine()
    engine.max_seq_len = 4096
    answer = await ask(engine, path, body | ({"max_tokens": 3} if path == MESSAGES else {}))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{place}: "), error
    assert error.get("param", place) == place
