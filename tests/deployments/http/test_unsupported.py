"""Fields of OpenAI's responses and Anthropic's messages: no known field that would change the answer is ignored."""

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from deployments.http.messages_api.schemas import CountTokensBody, MessagesBody
from deployments.http.responses_api.schemas import ResponsesBody
from deployments.openai.errors import Unsupported
from deployments.openai.schemas import ChatBody
from deployments.openai.unsupported import CHAT_NEUTRAL, CheckedBody
from deployments.openai.validation import validate
from tests.deployments.http.engine_fields import HARMLESS

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSE: dict[str, Any] = {"input": "Hello"}
MESSAGE: dict[str, Any] = {"messages": HELLO, "max_tokens": 9}
# Of the bodies of `messages.create`, `messages.count_tokens` and their beta forms in anthropic 2.14, without headers.
ANTHROPICS_FIELDS = {
    "max_tokens", "messages", "model", "billing_policy", "cache_control", "compaction", "container", "context_management",
    "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers", "metadata", "output_config",
    "output_format", "service_tier", "speed", "stop_sequences", "stream", "system", "thinking", "thread", "tool_choice",
    "tools", "temperature", "top_k", "top_p",
}  # fmt: skip
KEEPS_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
CLEARS_TOOL_USES = {"edits": [{"type": "clear_tool_uses_20250919"}]}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": CITY} | fields]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": CITY} | fields]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        (function(allowed_callers=["programmatic"]), "tools[0].allowed_callers"),
        (function(**{"async": True}), "tools[0].async"),
        # Fields of chats, which would change a chat's answer.
        ({"min_tokens": 5}, "min_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_response_that_asks_for_what_is_not_supported_is_refused(fields: dict[str, Any], param: str) -> None:
    refused(ResponsesBody, RESPONSE | fields, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0, "max_tool_calls": 3, "moderation": None, "context_management": [], "access_programs": {}},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h", "prewarm": False}, "prompt_cache_retention": "24h"},
        {"service_tier": "flex", "stream_options": {"include_obfuscation": True}, "stream": True},
        {
            "text": {"verbosity": "low"},
            "verbosity": "low",
            "web_search_options": {},
            "store": True,
            "truncation": "auto",
        },
        {"reasoning": {"mode": "standard", "context": "auto", "summary": "auto"}},
        function(defer_loading=True, allowed_callers=["direct"], output_schema=None),
        {"min_tokens": 0, "bad_words": [], "n": 1, "logprobs": False, "response_format": {"type": "text"}},
        {"nobody_knows_this": {"a": 1}},
    ],
)
def test_a_response_may_have_neutral_values_and_unknown_fields(fields: dict[str, Any]) -> None:
    plain = validate(ResponsesBody, RESPONSE | {name: fields[name] for name in ("tools", "stream") if name in fields})
    assert validate(ResponsesBody, RESPONSE | fields).chat.body == plain.chat.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mcp_servers": [{"type": "url", "name": "n", "url": "u"}]}, "mcp_servers"),
        ({"fallbacks": [{"model": "m"}]}, "fallbacks"),
        ({"billing_policy": {"type": "billing_policy", "bill_to": "user_profile"}}, "billing_policy"),
        ({"context_management": CLEARS_TOOL_USES}, "context_management"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        (tool(allowed_callers=["code_execution_20250825"]), "tools[0].allowed_callers"),
        (tool(input_examples=[{"city": "Rome"}]), "tools[0].input_examples"),
        ({"stop": ["x"]}, "stop"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ],
)
def test_a_message_that_asks_for_what_is_not_supported_is_refused(fields: dict[str, Any], param: str) -> None:
    refused(MessagesBody, MESSAGE | fields, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"mcp_servers": [], "container": None, "fallbacks": "default", "inference_geo": "global", "speed": "fast"},
        {"context_management": KEEPS_THINKING, "diagnostics": {"previous_message_id": "msg_1"}},
        {"cache_control": {"type": "ephemeral"}, "service_tier": "auto", "output_config": {"task_budget": None}},
        {"billing_policy": {"type": "billing_policy", "bill_to": "self"}, "nobody_knows_this": [1]},
        tool(defer_loading=True, allowed_callers=["direct"], input_examples=[], eager_input_streaming=True),
    ],
)
def test_a_message_may_have_neutral_values_and_unknown_fields(fields: dict[str, Any]) -> None:
    plain = validate(MessagesBody, MESSAGE | (tool() if "tools" in fields else {}))
    assert validate(MessagesBody, MESSAGE | fields).chat.body == plain.chat.body


def test_a_count_refuses_only_what_would_change_the_prompt() -> None:
    changing = {"mcp_servers": [{}], "container": "c", "thread": {}, "context_management": CLEARS_TOOL_USES}
    for param, value in changing.items():
        refused(CountTokensBody, {"messages": HELLO, param: value}, param)
    others = {"compaction": {"type": "summarize"}, "fallbacks": [{"model": "m"}], "stop": ["x"]}
    validate(CountTokensBody, MESSAGE | others)


def refused(kind: type[CheckedBody], body: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as caught:
        validate(kind, body)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: not supported by this server: ")


def test_every_field_of_the_clients_is_supported_or_has_its_neutral_values() -> None:
    known = ResponsesBody.model_fields.keys() | ResponsesBody.neutral | HARMLESS
    assert ResponseCreateParamsBase.__annotations__.keys() <= known
    assert MessagesBody.model_fields.keys() | MessagesBody.neutral >= ANTHROPICS_FIELDS
    assert CompletionCreateParamsBase.__annotations__.keys() <= ChatBody.model_fields.keys() | CHAT_NEUTRAL | HARMLESS


@pytest.mark.parametrize("kind", [ResponsesBody, MessagesBody])
def test_every_field_of_chats_that_changes_an_answer_is_known_to_the_other_forms(kind: type[CheckedBody]) -> None:
    changes_nothing = {"priority", "user", "stream_options"}
    unknown = ChatBody.model_fields.keys() - kind.model_fields.keys() - kind.neutral.keys() - changes_nothing
    assert unknown <= {"messages"}


@pytest.mark.parametrize("is_strict", [True, False])
def test_the_tools_of_a_message_may_be_strict(is_strict: bool) -> None:
    assert validate(MessagesBody, MESSAGE | tool(strict=is_strict)).chat.body.tools[0].strict is is_strict


def test_a_message_may_have_system_messages_between_the_others() -> None:
    turns = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *HELLO]
    chat = validate(MessagesBody, MESSAGE | {"messages": turns}).chat.body
    assert [(each.role, each.content) for each in chat.messages][1] == ("system", "Be brief.")


@pytest.mark.parametrize(("is_error", "text"), [(True, "Error: no such city"), (False, "no such city")])
def test_the_prompt_says_that_a_tools_result_is_an_error(is_error: bool, text: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no such city", "is_error": is_error}
    turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert validate(MessagesBody, MESSAGE | {"messages": turns}).chat.body.messages[-1].content == text
