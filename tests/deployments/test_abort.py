"""`abort` ends a request by its id, however it was sent: the deployment's class over a fake group, without Serve."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from deployments.handle_types import ChatRequest
from deployments.http.app import build_http_app
from llama_core.errors import RequestAborted
from llama_core.scheduling.sampling_params import SamplingParams
from tests.deployments.handles import ingress_over
from tests.support.fake_rank_group import FakeGroup
from tests.support.waiting import until_true

PARAMS = SamplingParams(0.0, max_tokens=60, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]
NAME = "mine"


class Replica:
    """The deployment's methods and its HTTP application, over ranks that compute nothing before `group.go` is set."""

    def __init__(self) -> None:
        self.group = FakeGroup()
        self.group.go.clear()
        self.api = ingress_over(self.group, max_seq_len=256, max_batch_size=2)
        self.service = self.api.service
        self.app = build_http_app(self.service, self.api.metrics)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        headers = {"x-request-id": NAME, **body.pop("headers", {})}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            return await client.post(path, json=body)

    async def aborted(self, call: Awaitable[Any]) -> Any:
        """What a call gives that is aborted before its first token."""
        running = asyncio.ensure_future(call)
        await until_true("it runs", lambda: self.service.describe().requests_running, pause_s=0)
        assert await self.api.abort("another") is False
        assert await self.api.abort("") is False
        assert await self.api.abort(NAME) is True
        result = await running
        assert self.service.describe().blocks_used == 0
        assert await self.api.abort(NAME) is False
        return result


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    starting = asyncio.create_task(made.service.start())
    made.group.go.set()
    await starting
    made.group.go.clear()
    yield made
    made.group.go.set()
    await made.service.stop()


async def listed(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


CALLS_WITH_REASON: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "sample": lambda api: api.sample([[1, 5]], PARAMS, request_id=NAME),
    "stream_sample": lambda api: listed(api.stream_sample([1, 5], PARAMS, request_id=NAME)),
    "chat": lambda api: api.chat(ChatRequest(HELLO, request_id=NAME), PARAMS),
    "stream_chat": lambda api: listed(api.stream_chat(ChatRequest(HELLO, request_id=NAME), PARAMS)),
    "stream": lambda api: listed(api.stream([1, 5], request_id=NAME)),
}
CALLS_WITHOUT: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "generate": lambda api: api.generate([[1, 5]] * 40, 60, request_id=NAME),
    "text_completion": lambda api: api.text_completion(["hi"], request_id=NAME),
    "chat_completion": lambda api: api.chat_completion([HELLO], request_id=NAME),
    "score": lambda api: api.score([1, 5], [[4]], request_id=NAME),
}


@pytest.mark.parametrize("call", CALLS_WITH_REASON)
async def test_the_finish_reason_of_an_aborted_call_is_abort(call: str, replica: Replica) -> None:
    found = await replica.aborted(CALLS_WITH_REASON[call](replica.api))
    last = found[-1] if isinstance(found, list) else found
    assert (last["finish_reason"] if isinstance(last, dict) else last.finish_reason) == "abort"


@pytest.mark.parametrize("call", CALLS_WITHOUT)
async def test_an_aborted_call_without_a_finish_reason_raises(call: str, replica: Replica) -> None:
    with pytest.raises(RequestAborted) as raised:
        await replica.aborted(CALLS_WITHOUT[call](replica.api))
    assert type(pickle.loads(pickle.dumps(raised.value))) is RequestAborted
    lines = replica.api.metrics.render().decode()
    assert 'outcome="cancelled",path="handle"} 1' in lines


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 60}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 60}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/score", {"prompt": "a", "continuations": ["b"]}),
    ],
)
async def test_a_request_over_http_is_aborted_by_the_id_of_its_answer(
    path: str, body: dict[str, Any], replica: Replica
) -> None:
    answer = await replica.aborted(replica.post(path, **body))
    assert (answer.status_code, answer.headers["x-request-id"]) == (503, NAME)
    assert answer.headers["x-should-retry"] == "false"  # or the SDKs would send the request again
    error = answer.json()["error"]
    assert error["message"] == "This request was aborted by its id."
    assert error.get("code") == (None if path == "/v1/messages" else "request_aborted")


async def test_a_stream_that_is_aborted_ends_with_an_error_and_is_computed_again_for_who_asks(replica: Replica) -> None:
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    headers = {"Idempotency-Key": "k"}
    running = asyncio.create_task(replica.post("/v1/completions", headers=headers, **body))
    await until_true("it runs", lambda: replica.service.describe().requests_running, pause_s=0)
    while len(replica.group.steps) < 4:  # some tokens, and then no more
        replica.group.go.set()
        await asyncio.sleep(0)
    replica.group.go.clear()
    assert await replica.api.abort(NAME)
    text = (await running).text
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    assert '"code":"request_aborted"' in events[-1]
    assert len(events) > 1 and "[DONE]" not in text
    last = [line for line in text.splitlines() if line.startswith("id: ")][-1].removeprefix("id: ")
    assert not replica.service.describe().requests_running
    replica.group.go.set()
    again = await replica.post("/v1/completions", headers={**headers, "Last-Event-ID": last}, **body)
    assert again.status_code == 200 and "[DONE]" in again.text
