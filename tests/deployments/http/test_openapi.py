"""The OpenAPI document describes what the routes answer: every status, the shape of each answer, and the API key."""

import json
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.interface import Readiness
from deployments.http.app import build_http_app
from deployments.http.limits import HttpLimits
from deployments.http.request_body import BodyLimits
from deployments.observe.metrics import Metrics
from tests.support.scripted_engine import MODEL_ID, FakeEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
JSON = {"content-type": "application/json"}
# Method, path as it is asked for, path in the document, arguments of the request.
REQUESTS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("POST", "/v1/completions", "", {"json": {"prompt": "x", "logprobs": 1, "service_tier": "auto"}}),
    ("POST", "/v1/completions", "", {"json": {"prompt": "x", "prompt_logprobs": 1, "return_token_ids": True}}),
    ("POST", "/v1/completions", "", {"json": {"prompt": "x", "stream": True}}),
    ("POST", "/v1/completions", "", {"content": b"x" * 70_000, "headers": JSON}),
    ("POST", "/v1/completions", "", {"content": b"{}"}),
    ("POST", "/v1/chat/completions", "", {"json": {**CHAT, "logprobs": True, "n": 2}}),
    ("POST", "/v1/chat/completions", "", {"json": {**CHAT, "prompt_logprobs": 1, "return_token_ids": True}}),
    ("POST", "/v1/chat/completions", "", {"json": {**CHAT, "tools": TOOLS}}),
    ("POST", "/v1/embeddings", "", {"json": {"input": ["x", "y"]}}),
    ("POST", "/v1/embeddings", "", {"json": {"input": "x", "encoding_format": "base64"}}),
    ("POST", "/v1/score", "", {"json": {"prompt": "x", "continuations": ["a", "b b"]}}),
    ("POST", "/v1/classify", "", {"json": {"prompt": "x", "labels": ["a", "b b"]}}),
    ("POST", "/v1/messages", "", {"json": {**CHAT, "model": MODEL_ID, "max_tokens": 5}}),
    ("POST", "/v1/messages", "", {"json": {**CHAT, "model": MODEL_ID, "max_tokens": 5, "stream": True}}),
    ("POST", "/v1/messages/count_tokens", "", {"json": {**CHAT, "model": MODEL_ID}}),
    ("POST", "/v1/responses", "", {"json": {"input": "hi"}}),
    ("POST", "/v1/responses", "", {"json": {"input": 5}}),
    ("GET", "/v1/models", "", {}),
    ("GET", f"/v1/models/{MODEL_ID}", "/v1/models/{model_id}", {}),
    ("POST", "/tokenize", "", {"json": {"prompt": "x"}}),
    ("POST", "/detokenize", "", {"json": {"tokens": [5]}}),
    ("GET", "/tokenizer_info", "", {}),
    ("POST", "/tokenize", "", {"json": {"prompt": "x", "return_token_strs": True}}),
    ("GET", "/health", "", {}),
    ("GET", "/ping", "", {}),
    ("GET", "/load", "", {}),
    ("GET", "/version", "", {}),
    ("GET", "/ready", "", {}),
    ("GET", "/metrics", "", {}),
    ("GET", "/props", "", {}),
]


@pytest.mark.parametrize("state", ["ready", "loading", "dead", "full", "locked"])
async def test_every_answer_is_one_that_the_document_describes(state: str) -> None:
    engine = FakeEngine()
    keys = ApiKeys(digests_of("secret")) if state == "locked" else None
    app = build_http_app(engine, Metrics(in_ray=False), HttpLimits(body=BodyLimits(max_bytes=60_000)), keys=keys)
    document = app.openapi()
    engine.alive = state != "dead"
    engine.max_streams = 0 if state == "full" else 100
    if state == "loading":
        engine.state = Readiness(False, "loading", "", retry_after_s=2.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        for method, path, documented, arguments in REQUESTS:
            answer = await client.request(method, path, **arguments)
            operation = document["paths"][documented or path][method.lower()]
            described = operation["responses"].get(str(answer.status_code))
            assert described is not None, (method, path, answer.status_code)
            media_type = answer.headers["content-type"].partition(";")[0]
            schema = {**described["content"][media_type]["schema"], "components": document["components"]}
            assert len(schema) > 1, "the schema says something"
            content = answer.json() if media_type == "application/json" else answer.text
            Draft202012Validator(schema).validate(content)


def test_every_operation_has_an_id_of_its_own_and_a_way_to_send_the_key() -> None:
    document = build_http_app(FakeEngine(), Metrics(in_ray=False)).openapi()
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    schemes = document["components"]["securitySchemes"]
    assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
    assert {name for need in document["security"] for name in need} == set(schemes)
    assert document["paths"]["/health"]["get"]["security"] == []
    bodies = [operation["requestBody"] for operation in operations if "requestBody" in operation]
    assert bodies and all(body["required"] for body in bodies)
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


async def test_the_paths_follow_the_prefix_below_which_the_application_is_mounted() -> None:
    app = build_http_app(FakeEngine(), Metrics(in_ray=False))
    for prefix, servers in (("", None), ("/llama", [{"url": "/llama"}])):
        transport = httpx.ASGITransport(app, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            document = (await client.get(f"{prefix}/openapi.json")).json()
        assert document.get("servers") == servers and "/v1/models" in document["paths"]


def test_every_schema_is_used_and_has_a_name_that_is_no_path_of_a_module() -> None:
    """Generators of clients make a class of each; two that end alike are one class twice."""
    document = build_http_app(FakeEngine(), Metrics(in_ray=False)).openapi()
    referred = {ref.rpartition("/")[2] for ref in re.findall(r'"(#/components/schemas/[^"]*)"', json.dumps(document))}
    assert referred == set(document["components"]["schemas"])
    assert [name for name in referred if not re.fullmatch(r"[A-Z][A-Za-z]+", name)] == []
