"""Web pages of configured origins may call the server; others get no permission, and nobody does by default."""

import httpx
import pytest
from pydantic import ValidationError

from deployments.api_keys import ApiKeys, digests_of
from deployments.args import ServerArgs
from deployments.engine.metrics import Metrics
from deployments.http.app import build_http_app
from tests.support.scripted_engine import FakeEngine

PAGE = "https://chat.example.com:8443"
ASKED = "authorization,content-type,x-stainless-os"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ASKED}


def http(*origins: str) -> httpx.AsyncClient:
    app = build_http_app(FakeEngine(), Metrics(in_ray=False), keys=ApiKeys(digests_of("secret")), cors_origins=origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


async def test_a_page_of_a_configured_origin_may_ask_without_a_key_and_read_every_answer() -> None:
    async with http(PAGE) as client:
        answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert answer.headers["access-control-allow-headers"] == ASKED
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in answer.headers
        for key, path, status in (
            ("secret", "/v1/models", 200),
            ("wrong", "/v1/models", 401),
            ("secret", "/v1/x", 404),
        ):
            answer = await client.get(path, headers={"Origin": PAGE, "x-api-key": key})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "X-Request-ID" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.com", "null", PAGE + ".evil.example"])
async def test_other_origins_are_not_allowed(origin: str) -> None:
    async with http(PAGE) as client:
        answer = await client.get("/v1/models", headers={"Origin": origin, "x-api-key": "secret"})
        refused = await client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        assert refused.status_code == 400
        assert not any("access-control-allow-origin" in each.headers for each in (answer, refused))


async def test_nobody_is_allowed_by_default_and_everybody_by_a_star() -> None:
    async with http() as client:
        assert not (await client.options("/v1/completions", headers=PREFLIGHT)).is_success
        assert "access-control-allow-origin" not in (await client.get("/health", headers={"Origin": PAGE})).headers
    async with http("*") as client:
        answer = await client.get("/health", headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


def test_the_argument_takes_origins_and_names_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerArgs(cors_origins=(PAGE.upper(), "*")).cors_origins == (PAGE, "*")
    monkeypatch.setenv("LLAMA_CORS_ORIGINS", f"{PAGE}, app://obsidian.md")
    assert ServerArgs().cors_origins == (PAGE, "app://obsidian.md")
    for bad in ("chat.example.com", "https://*.example.com", "https://a.example/", ""):
        with pytest.raises(ValidationError, match="cors_origins"):
            ServerArgs(cors_origins=(bad,))
