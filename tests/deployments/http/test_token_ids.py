"""`return_token_ids`, `return_tokens_as_token_ids` and `return_token_strs`, in vLLM's shapes."""

from typing import Any

import httpx
import pytest

from deployments.engine.metrics import Metrics
from deployments.http.app import build_http_app
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.scripted_engine import FakeEngine, sse
from tests.support.tool_calls import TOOLS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CALL = f'<tool_call>\n{{"name": "{TOOLS[0].name}", "arguments": {{}}}}\n</tool_call>'


async def post(engine: FakeEngine, path: str, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(build_http_app(engine, Metrics(in_ray=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
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


async def test_every_token_of_a_stream_is_there_also_where_it_has_no_text_yet() -> None:
    engine = FakeEngine("🙂🙂")
    chunks = sse((await post(engine, "/v1/completions", prompt="x", stream=True, return_token_ids=True)).text)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert any(part["token_ids"] and not part["text"] for part in parts[:-1]), "an emoji is several tokens"
    text = engine.tokenizer.decode(joined(chunks, 0))
    assert text.strip() == "🙂🙂"


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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_who_does_not_ask_gets_no_ids(path: str) -> None:
    body = CHAT if "chat" in path else {"prompt": "x"}
    for options in ({}, {"return_token_ids": False}, {"stream": True}, {"stream": True, "logprobs": 1}):
        options = {"logprobs": True} if "chat" in path and options.get("logprobs") else options
        assert "token_ids" not in (await post(FakeEngine("Hi."), path, **body, **options)).text


async def test_log_probabilities_name_tokens_by_their_ids() -> None:
    engine = FakeEngine("One two.")
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = (await post(engine, "/v1/completions", prompt="x", logprobs=2, **options)).json()["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    chat = (await post(engine, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2, **options)).json()
    [choice] = chat["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(each["token"].startswith("token_id:") for entry in entries for each in entry["top_logprobs"])


async def test_tokenize_names_tokens_on_request() -> None:
    engine = FakeEngine()
    plain = (await post(engine, "/tokenize", prompt="Hello there")).json()
    named = (await post(engine, "/tokenize", prompt="Hello there", return_token_strs=True)).json()
    assert plain["token_strs"] is None
    assert named["token_strs"] == [engine.tokenizer.token_name(token) for token in named["tokens"]]


async def test_load_counts_requests_and_ping_and_version_answer() -> None:
    engine = FakeEngine()
    transport = httpx.ASGITransport(build_http_app(engine, Metrics(in_ray=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/ping")).json() == {"status": "ok"}
        assert (await client.get("/load")).json() == {"server_load": 0}
        streams = engine.submit_all([([1], SamplingParams())] * 2)
        assert (await client.get("/load")).json() == {"server_load": 2}
        for stream in streams:
            stream.cancel()
        assert (await client.get("/version")).json()["version"][0].isdigit()
