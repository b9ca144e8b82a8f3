"""Requests in the form that the Codex CLI 0.171 sends them, with texts of our own."""

import json
from typing import Any

import httpx

from deployments.openai.field_types import NOT_TEXT
from llama_core.text.tools.tool import Call
from llama_core.text.tools.tool_format import find_tool_format
from tests.support.scripted_engine import FakeEngine, ask, calling_engine


def engine_that_calls(name: str, **arguments: Any) -> FakeEngine:
    return calling_engine(find_tool_format("hermes").written_calls([Call(name, json.dumps(arguments))]))


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.streams[-1].prompt)


def codex_function(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": parameters}


def codex(*later: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """later: the items after the first message of the user."""
    text, number = {"type": "string", "description": "d"}, {"type": "number", "description": "d"}
    option = {"type": "object", "properties": {"label": text}, "required": ["label"], "additionalProperties": False}
    part = {"type": "object", "properties": {"text": text, "path": text}, "additionalProperties": False}
    agents = [
        codex_function("close_agent", ["target"], target=text),
        codex_function("spawn_agent", [], items={"type": "array", "items": part}, fork_context={"type": "boolean"}),
    ]
    tools = [
        codex_function("exec_command", ["cmd"], cmd=text, tty={"type": "boolean"}, yield_time_ms=number,
                       prefix_rule={"type": "array", "items": {"type": "string"}},
                       sandbox_permissions=text | {"enum": ["use_default", "require_escalated"]}),
        codex_function("request_user_input", ["questions"], questions={"type": "array", "items": option}),
        codex_function("view_image", ["path"], path=text),
        {"type": "namespace", "name": "multi_agent_v1", "description": "d", "tools": agents},
        codex_function("get_goal", []),
        {"type": "web_search", "external_web_access": False},
    ]  # fmt: skip
    texts = {"developer": ["You are an agent.", "Nothing may be written."], "user": ["Here is /work.", "Look around."]}
    items = [
        {"type": "message", "id": f"msg_{role}{at}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, each in texts.items()
        for at, text in enumerate(each)
    ]
    metadata = {"session_id": "s", "turn_id": "t", "x-codex-turn-metadata": "{}"}
    return {
        "model": "fake-llama", "stream": True, "input": [*items, *later], "tools": tools, "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": metadata, **fields,
    }  # fmt: skip


def codex_call(number: int, name: str, arguments: str, output: Any, **fields: Any) -> list[dict[str, Any]]:
    call_id = f"call_{number}"
    call = {"type": "function_call", "status": "completed", "id": f"fc_{number}", "name": name, "call_id": call_id}
    result = {"type": "function_call_output", "id": f"fco_{number}", "call_id": call_id, "output": output}
    return [{**call, "arguments": arguments, **fields}, result]


def calls_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.split("\n\n")[-2].partition("data: ")[2])
    assert last["type"] == "response.completed", last
    return [item for item in last["response"]["output"] if item["type"] == "function_call"]


async def test_the_codex_cli_as_shipped_gets_its_calls() -> None:
    engine = engine_that_calls("exec_command", cmd="ls", yield_time_ms=500)
    (call,) = calls_of(await ask(engine, "/v1/responses", codex()))
    assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "ls", "yield_time_ms": 500})
    assert "namespace" not in call and engine.streams[-1].params.grammar
    assert '"multi_agent_v1__spawn_agent"' in prompt_of(engine) and "web_search" not in prompt_of(engine)
    (call,) = calls_of(
        await ask(engine_that_calls("multi_agent_v1__close_agent", target="a"), "/v1/responses", codex())
    )
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")


async def test_a_later_turn_of_the_codex_cli_has_what_the_earlier_ones_had() -> None:
    engine = engine_that_calls("get_goal")
    image = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    later = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        *codex_call(1, "close_agent", '{"target": "x"}', "no such agent", namespace="multi_agent_v1"),
        *codex_call(2, "view_image", '{"path": "a.png"}', image),
        *codex_call(3, "get_goal", "", "none"),
        *codex_call(4, "get_goal", "null", "none"),
        *codex_call(5, "exec_command", "ls", "arguments must be JSON"),
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "c6", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c6", "output": "Done"},
        *codex_call(7, "get_goal", "{}", None),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So far."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    assert [call["name"] for call in calls_of(await ask(engine, "/v1/responses", codex(*later)))] == ["get_goal"]
    prompt = prompt_of(engine)
    assert '"name": "multi_agent_v1__close_agent", "arguments": {"target": "x"}' in prompt
    assert prompt.count('"name": "get_goal", "arguments": {}') == 3
    assert '"name": "exec_command", "arguments": "ls"' in prompt and NOT_TEXT in prompt
