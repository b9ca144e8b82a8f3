"""`return_token_ids`, `return_tokens_as_token_ids` and `return_token_strs`, in vLLM's shapes."""

from dataclasses import replace
from importlib import metadata
from typing import Any

import httpx
import pytest

from deployments.engine.interface import EngineState
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.support.scripted_engine import FakeEngine, in_process, sse
from tests.support.tool_calls import TOOLS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CALL = f'<tool_call>\n{{"name": "{TOOLS[0].name}", "arguments": {{}}}}\n</tool_call>'

THINKER = "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ '<think>' if add_generation_prompt }}{# </think> #}"


async def post(engine: FakeEngine, path: str, **body: Any) -> httpx.Response:
    async with in_process(engine) as client:
        answer = await client.post(path, json={"seed": 5, "max_tokens": 200, **body})
        assert answer.status_code == 200, answer.text
        return answer


async def tokens_of(engine: FakeEngine, **body: Any) -> list[int]:
    answer = await post(engine, "/tokenize", **body)
    found: list[int] = answer.json()["tokens"]
    return found


def joined(chunks: list[dict[str, Any]], index: int) -> list[int]:
    """The ids of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice.get("token_ids", ())]


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"stop": " two"}, {"echo": True}])
async def test_a_completion_has_its_ids_and_its_prompts(options: dict[str, Any]) -> None:
    engine, prompts = FakeEngine("One 🙂 two, three."), ["x", "a longer one"]
    body = {"prompt": prompts, "n": 2, "return_token_ids": True, **options}
    whole = (await post(engine, "/v1/completions", **body)).json()
    expected = [await tokens_of(engine, prompt=prompt) for prompt in prompts]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids for ids in expected for _ in range(2)]
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    assert "prompt_token_ids" not in whole
    chunks = sse((await post(engine, "/v1/completions", stream=True, **body)).text)
    for index, choice in enumerate(whole["choices"]):
        assert joined(chunks, index) == choice["token_ids"] != []
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in part for part in mine[1:])
        assert "".join(part["text"] for part in mine) == choice["text"]


@pytest.mark.parametrize("tools", [False, True])
async def test_a_chat_has_its_ids_and_once_its_prompts(tools: bool) -> None:
    engine = FakeEngine(CALL if tools else "Hello there.")
    engine.max_seq_len, engine.tool_format = 8192, "hermes"
    offered = {"tools": [tool.described() for tool in TOOLS]} if tools else {}
    body: dict[str, Any] = {**CHAT, **offered, "n": 2, "return_token_ids": True}
    whole = (await post(engine, "/v1/chat/completions", **body)).json()
    assert whole["prompt_token_ids"] == await tokens_of(engine, **CHAT, **offered)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls" if tools else "stop"] * 2
    chunks = sse((await post(engine, "/v1/chat/completions", stream=True, **body)).text)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    for index, choice in enumerate(whole["choices"]):
        assert joined(chunks, index) == choice["token_ids"]
        assert engine.tokenizer.decode(choice["token_ids"]).strip() == engine.answer


async def test_tokenize_names_tokens_on_request() -> None:
    engine = FakeEngine()
    plain = (await post(engine, "/tokenize", prompt="Hello there")).json()
    named = (await post(engine, "/tokenize", prompt="Hello there", return_token_strs=True)).json()
    assert plain["token_strs"] is None
    assert named["token_strs"] == [engine.tokenizer.token_name(token) for token in named["tokens"]]


async def test_ids_and_log_probabilities_of_reasoning_and_calls_go_beside_their_pieces() -> None:
    engine = FakeEngine("So.\n</think>\n\n" + CALL)
    engine.max_seq_len, engine.tool_format = 8192, "hermes"
    engine.chat_format = TemplateChatFormat(engine.tokenizer, THINKER)
    options = {"tools": [TOOLS[0].described()], "return_token_ids": True, "return_tokens_as_token_ids": True}
    body: dict[str, Any] = {**CHAT, **options, "logprobs": True, "top_logprobs": 0}
    [choice] = (await post(engine, "/v1/chat/completions", **body)).json()["choices"]
    assert choice["message"]["reasoning_content"] == "So." and len(choice["message"]["tool_calls"]) == 1
    assert engine.tokenizer.decode(choice["token_ids"]).strip() == engine.answer
    chunks = sse((await post(engine, "/v1/chat/completions", stream=True, **body)).text)
    assert joined(chunks, 0) == choice["token_ids"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]


class Loaded(FakeEngine):
    def describe(self) -> EngineState:
        return replace(super().describe(), requests_running=3, requests_waiting=4)


async def test_load_counts_running_and_waiting_requests() -> None:
    async with in_process(Loaded()) as client:
        assert (await client.get("/load")).json() == {"server_load": 7}


async def test_version_is_that_of_the_package() -> None:
    async with in_process(FakeEngine()) as client:
        assert (await client.get("/version")).json() == {"version": metadata.version("llama-on-ray")}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_answers_as_health_does(method: str) -> None:
    engine = FakeEngine()
    async with in_process(engine) as client:
        for alive, status in ((True, 200), (False, 503)):
            engine.alive = alive
            ping, health = await client.request(method, "/ping"), await client.get("/health")
            assert (ping.status_code, ping.content) == (health.status_code, health.content)
            assert ping.status_code == status
