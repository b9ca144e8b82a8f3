"""Web pages of configured origins may call the server; others get no CORS headers, and nobody does by default."""

import httpx
import pytest
from pydantic import ValidationError

from deployments.api_keys import ApiKeys, digests_of
from deployments.args import ServerArgs
from deployments.engine.metrics import Metrics
from deployments.http.app import build_http_app
from tests.support.scripted_engine import FakeEngine

PAGE = "https://chat.example.com:8443"
COMPLETION = {"prompt": "hi", "max_tokens": 3}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def http(*origins: str, keys: ApiKeys | None = None) -> httpx.AsyncClient:
    app = build_http_app(FakeEngine(), Metrics(in_ray=False), keys=keys, cors_origins=origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


async def test_a_preflight_needs_no_api_key_and_permits_what_the_page_asks_for() -> None:
    async with http(PAGE, keys=ApiKeys(digests_of("secret"))) as client:
        for path in ("/v1/chat/completions", "/v1/models"):
            answer = await client.options(path, headers=PREFLIGHT)
            assert (answer.status_code, answer.content) == (204, b"")
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in answer.headers
            assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_refusals_can_be_read_by_the_page(stream: bool) -> None:
    async with http(PAGE, keys=ApiKeys(digests_of("secret"))) as client:
        for key, status in (("secret", 200), ("wrong", 401)):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json={**COMPLETION, "stream": stream}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
        lost = await client.get("/v1/nothing", headers={"Origin": PAGE, "x-api-key": "secret"})
        assert (lost.status_code, lost.headers["access-control-allow-origin"]) == (404, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.com", "null", PAGE + ".evil.example"])
async def test_other_origins_get_no_headers(origin: str) -> None:
    async with http(PAGE) as client:
        answer = await client.post("/v1/completions", json=COMPLETION, headers={"Origin": origin})
        assert cors_headers(answer) == {}
        refused = await client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        assert (refused.status_code, cors_headers(refused)) == (405, {})


async def test_nobody_is_allowed_by_default_and_everybody_by_a_star() -> None:
    async with http() as client:
        assert (await client.options("/v1/completions", headers=PREFLIGHT)).status_code == 405
        assert cors_headers(await client.get("/v1/models", headers={"Origin": PAGE})) == {}
    async with http("*") as client:
        answer = await client.get("/v1/models", headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "vary" not in answer.headers


def test_the_argument_takes_origins_and_names_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerArgs().cors_origins == ()
    assert ServerArgs(cors_origins=(PAGE, "*")).cors_origins == (PAGE, "*")
    monkeypatch.setenv("LLAMA_CORS_ORIGINS", f"{PAGE}, app://obsidian.md")
    assert ServerArgs().cors_origins == (PAGE, "app://obsidian.md")
    for bad in ("chat.example.com", "https://*.example.com", "https://a.example/", ""):
        with pytest.raises(ValidationError, match="cors_origins"):
            ServerArgs(cors_origins=(bad,))
