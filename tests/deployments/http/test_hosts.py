"""Without API keys, a Host header may have known names only, so that no page can rebind DNS; and web pages of other origins."""

import socket

import httpx
import pytest
from pydantic import ValidationError

from deployments.api_keys import ApiKeys, digests_of
from deployments.args import ServerArgs
from deployments.engine.interface import Readiness
from tests.support.scripted_engine import FakeEngine, assert_error, in_process

COMPLETION = {"prompt": "hi", "max_tokens": 3}


def http(*names: str, keys: ApiKeys | None = None, engine: FakeEngine | None = None) -> httpx.AsyncClient:
    return in_process(engine or FakeEngine(), keys=keys, allowed_hosts=names)


# Of containers, of Docker's host, by mDNS, and by RFC 6761.
LOCAL = ["llama:8000", "host.docker.internal:8000", "Box.local", "a.b.localhost"]


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3:80", "[fe80::1]:8000", "LOCALHOST:8000", "localhost.", *LOCAL])
async def test_addresses_and_names_that_nobody_can_register_are_allowed(host: str) -> None:
    async with http() as client:
        assert (await client.post("/v1/completions", json=COMPLETION, headers={"Host": host})).status_code == 200


HOSTILE = ["evil.example:8000", "127.0.0.1.evil.example", "localhost:8000.evil.example", "[::1].evil.example"]
HOSTILE += ["127.0.0.1:evil", "internal.evil.example", "localhost.evil", "", ".", ":8000", "[evil]", "1.2.3"]


@pytest.mark.parametrize("host", HOSTILE)
async def test_a_name_that_is_not_configured_is_403_on_every_route(host: str) -> None:
    engine = FakeEngine()
    async with http(engine=engine) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/"), ("GET", "/props"), ("GET", "/v1/nothing/")):
            body = COMPLETION if method == "POST" else None
            answer = await client.request(method, path, json=body, headers={"Host": host})
            error = assert_error(answer, 403, "host_not_allowed")
            assert error["type"] == "permission_error"
            assert "allowed_hosts" in (error["message"] or "") and "evil" not in answer.text
    assert not engine.streams


async def test_configured_names_and_this_machines_own_are_allowed_with_any_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Desk.corp.example")
    allowed = ("llama.example", "box:8000", "example.", "desk.corp.example:8000")
    async with http("llama.example", "Box") as client:
        for host in (*allowed, "a.llama.example", "other.corp.example"):
            status = (await client.get("/props", headers={"Host": host})).status_code
            assert status == (200 if host in allowed else 403), host


async def test_with_keys_any_host_is_allowed() -> None:
    async with http(keys=ApiKeys(digests_of("secret"))) as client:
        headers = {"Host": "llama.example", "Authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


async def test_probes_answer_any_host_without_details() -> None:
    engine = FakeEngine()
    engine.state = Readiness(False, "loading", "rank 0 reads /models/llama")
    async with http(engine=engine) as client:
        assert (await client.get("/health", headers={"Host": "llama.example"})).status_code == 200
        assert "/models" not in (await client.get("/ready", headers={"Host": "llama.example"})).text
        assert "/models" in (await client.get("/ready")).text


async def test_no_redirect_is_made_of_a_host() -> None:
    async with http() as client:
        for path in ("/v1/models/../../x", "/health/", "/v1/completions/", "//evil.example/"):
            answer = await client.get(path, headers={"Host": "localhost"})
            assert answer.status_code in (200, 404, 405)
            assert "location" not in answer.headers


def test_names_are_a_list_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("llama.example", "box_1", "BOX.", "10.1.2.3", "xn--bcher-kva.example")
    assert ServerArgs.model_validate({"allowed_hosts": names}).allowed_hosts == names
    monkeypatch.setenv("LLAMA_ALLOWED_HOSTS", "llama.example, box")
    assert ServerArgs().allowed_hosts == ("llama.example", "box")
    for name in ("", " ", ".", "*", "http://box", "box:8000", "a b", "box,"):
        with pytest.raises(ValidationError, match="allowed_hosts") as caught:
            ServerArgs.model_validate({"allowed_hosts": ["box", name]})
        assert "a plain host name without scheme or port" in str(caught.value)


# Web pages of other origins.

PAGE = "https://chat.example.com:8443"
ASKED = "authorization,content-type,x-stainless-os"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ASKED}


def of_origins(*origins: str) -> httpx.AsyncClient:
    return in_process(FakeEngine(), keys=ApiKeys(digests_of("secret")), cors_origins=origins)


async def test_a_page_of_a_configured_origin_may_ask_without_a_key_and_read_every_answer() -> None:
    async with of_origins(PAGE) as client:
        answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert answer.headers["access-control-allow-headers"] == ASKED
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in answer.headers
        asked = [("secret", "/v1/models", 200), ("wrong", "/v1/models", 401), ("secret", "/v1/x", 404)]
        for key, path, status in asked:
            answer = await client.get(path, headers={"Origin": PAGE, "x-api-key": key})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "X-Request-ID" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.com", "null", PAGE + ".evil.example"])
async def test_other_origins_are_not_allowed(origin: str) -> None:
    async with of_origins(PAGE) as client:
        answer = await client.get("/v1/models", headers={"Origin": origin, "x-api-key": "secret"})
        refused = await client.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin})
        assert refused.status_code == 400
        assert not any("access-control-allow-origin" in each.headers for each in (answer, refused))


async def test_nobody_is_allowed_by_default_and_everybody_by_a_star() -> None:
    async with of_origins() as client:
        assert not (await client.options("/v1/completions", headers=PREFLIGHT)).is_success
        assert "access-control-allow-origin" not in (await client.get("/health", headers={"Origin": PAGE})).headers
    async with of_origins("*") as client:
        answer = await client.get("/health", headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


def test_the_argument_takes_origins_and_names_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerArgs(cors_origins=(PAGE.upper(), "*")).cors_origins == (PAGE, "*")
    monkeypatch.setenv("LLAMA_CORS_ORIGINS", f"{PAGE}, app://obsidian.md")
    assert ServerArgs().cors_origins == (PAGE, "app://obsidian.md")
    for bad in ("chat.example.com", "https://*.example.com", "https://a.example/", ""):
        with pytest.raises(ValidationError, match="cors_origins"):
            ServerArgs(cors_origins=(bad,))
