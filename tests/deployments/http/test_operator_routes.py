"""What operators and clients ask of a server beside answers: its models, its readiness, its log, and paths it lacks."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime

import httpx
import openai
import pytest

from deployments.engine.interface import Readiness
from tests.support import http
from tests.support.scripted_engine import (
    MAX_SEQ_LEN,
    MODEL_ID,
    FakeEngine,
    Served,
    assert_error,
    canary,
    in_process,
    serve,
)


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(FakeEngine("Hello there, 🙂 how are you?")) as running:
        yield running
        canary(running)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="whatever", max_retries=0) as made:
        yield made


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL_ID]
    fields = models[0].model_dump()
    assert (fields["root"], fields["parent"], fields["max_model_len"]) == (MODEL_ID, None, MAX_SEQ_LEN)
    assert fields["object"] == "model" and fields["created"] > 1.7e9 and fields["owned_by"]
    assert client.models.retrieve(MODEL_ID).model_dump() == fields


def test_models_have_the_fields_that_anthropics_client_reads(served: Served) -> None:
    page = httpx.get(served.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, MODEL_ID, MODEL_ID)
    (model,) = page["data"]
    assert (model["type"], model["display_name"], model["lifecycle"]) == ("model", MODEL_ID, "active")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert model["max_input_tokens"] == model["max_tokens"] == MAX_SEQ_LEN
    assert httpx.get(f"{served.url}/v1/models/{MODEL_ID}").json() == model


def test_a_loading_or_draining_server_answers_503_and_is_alive(served: Served) -> None:
    for phase in ("loading", "draining", "failed"):
        served.engine.state = Readiness(False, phase, "rank 1 of 2 has its weights", retry_after_s=2.5)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = http.post(served.url + path, json={"prompt": "x"})
            assert_error(answer, 503, "not_ready")
            assert answer.headers["retry-after"] == "3"
        ready = http.get(served.url + "/ready")
        assert ready.status_code == 503
        assert ready.headers["retry-after"] == "3"
        assert ready.json()["phase"] == phase
        assert ready.json()["error"]["code"] == "not_ready"
        assert http.get(served.url + "/health").status_code == 200
    served.engine.state = Readiness(True, "ready")
    assert http.get(served.url + "/ready").json() == {"ready": True, "phase": "ready", "detail": ""}
    served.engine.alive = False
    assert http.get(served.url + "/health").status_code == 503


def test_a_request_id_is_echoed_clean_and_bounded_or_made(served: Served) -> None:
    def answered(given: dict[str, str]) -> str:
        return http.get(served.url + "/health", headers=given).headers["x-request-id"]

    assert answered({"x-request-id": "abc-1.2:3_4"}) == "abc-1.2:3_4"
    assert answered({"x-request-id": "a<b>\tc d"}) == "abcd"
    assert len(answered({"x-request-id": "a" * 10_000})) == 128
    assert len({answered({}), answered({}), answered({"x-request-id": "<>"})}) == 3


async def test_the_request_id_is_sent_once_behind_a_server_that_sends_it() -> None:
    async with in_process(FakeEngine(), sends_request_id=False) as client:
        assert "x-request-id" not in (await client.get("/health", headers={"x-request-id": "abc"})).headers


def test_each_request_is_one_line_of_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llama.requests")
    body = {"prompt": ["a", "b b"], "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.8}
    http.post(served.url + "/v1/completions", json=body, headers={"x-request-id": "r1"})
    http.post(served.url + "/v1/completions", json={"prompt": 3}, headers={"x-request-id": "r2"})
    lines = [record.getMessage() for record in caplog.records if record.name == "llama.requests"]
    first, second = lines
    levels = [record.levelno for record in caplog.records if record.name == "llama.requests"]
    assert levels == [logging.INFO] * 2, "a request that ends at its token limit is normal"
    fields = json.loads(first.removeprefix("request "))
    expected = {"request_id": "r1", "outcome": "ok", "batch_size": 2, "n": 2, "max_gen_len": 3, "temperature": 0.5,
                "top_p": 0.8, "generated": 12, "finish_reasons": {"length": 4}, "without_eos": 4}  # fmt: skip
    assert expected.items() <= fields.items()
    assert fields["ttft_ms"] >= 0
    assert fields["prompt_length"] == max(len(stream.prompt) for stream in served.engine.streams)
    assert json.loads(second.removeprefix("request "))["outcome"] == "invalid_parameter"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL_ID}", "/props"]
)
def test_head_has_the_headers_of_get_without_a_body(served: Served, path: str) -> None:
    head, get = http.head(served.url + path), http.get(served.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


ONCE = " OpenAI's clients take a base URL that ends in /v1, once."
NO_ROUTE = "There is no route {} {}; GET /docs lists them."
SLASHES = [
    (method, path + slashes, f"{NO_ROUTE.format(method, path + slashes)} Did you mean {path}?")
    for path in ("/v1/models", "/v1/chat/completions", "/v1/messages", "/tokenize", "/health")
    for slashes in ("/", "//")
    for method in ("GET", "POST")
]
MEANT = [
    ("/chat/completions", "/v1/chat/completions", ONCE), ("/embeddings", "/v1/embeddings", ONCE),
    ("/v1/v1/models", "/v1/models", ONCE),
    ("//v1/models", "/v1/models", ONCE), ("/api/v1/completions", "/v1/completions", ONCE), ("/v1/tokenize", "/tokenize", ""),
]  # fmt: skip
NOT_SERVED = {
    "/v1/rerank": "reranks no documents",
    "/v1/audio/transcriptions": "reads and makes no audio", "/v1/audio/speech": "reads and makes no audio",
    "/v1/images/generations": "makes no images", "/v1/moderations": "makes no moderations",
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        *SLASHES,
        *(
            ("POST", path, f"{NO_ROUTE.format('POST', path)} Did you mean {meant}?{hint}")
            for path, meant, hint in MEANT
        ),
        *(("POST", path, f"This server {what}; GET /docs lists its routes.") for path, what in NOT_SERVED.items()),
        *(("GET", path, "There is no such route; GET /docs lists them.") for path in ("/v2/secret", "/v1/" * 50)),
        *(("GET", path, NO_ROUTE.format("GET", path)) for path in ("/v1", "/v1/", "/v1/chat")),
    ],
)
async def test_a_path_that_does_not_exist_is_404_and_says_what_to_do(method: str, path: str, message: str) -> None:
    """/v1/models/ is not the model without a name. Other paths are not repeated."""
    async with in_process(FakeEngine()) as asking:
        answer = await asking.request(method, f"http://127.0.0.1{path}", json={})
    assert answer.status_code == 404 and answer.json()["error"]["message"] == message
    if not path.startswith("/v1/messages"):  # Anthropic's form
        assert_error(answer, 404, "not_found")


def test_neither_a_path_with_control_characters_nor_a_method_is_repeated(served: Served) -> None:
    error = assert_error(http.get(served.url + "/v1/chat%0Acompletions"), 400, "invalid_parameter")
    assert error["message"] == "The path has control characters."
    assert "SECRET" not in http.request("SECRET", served.url + "/v1").text
