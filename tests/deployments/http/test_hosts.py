"""Without API keys, a Host header may have addresses, localhost and configured names only: no page can rebind DNS."""

import httpx
import pytest
from pydantic import ValidationError

from deployments.api_keys import ApiKeys, digests_of
from deployments.args import ServerArgs
from deployments.engine.interface import Readiness
from deployments.engine.metrics import Metrics
from deployments.http.app import build_http_app
from tests.support.scripted_engine import FakeEngine, assert_error

COMPLETION = {"prompt": "hi", "max_tokens": 3}


def http(*names: str, keys: ApiKeys | None = None, engine: FakeEngine | None = None) -> httpx.AsyncClient:
    app = build_http_app(engine or FakeEngine(), Metrics(in_ray=False), keys=keys, allowed_hosts=names)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "10.1.2.3:80",
        "[::1]",
        "[fe80::1]:8000",
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
    ],
)
async def test_addresses_and_localhost_are_allowed(host: str) -> None:
    async with http() as client:
        assert (await client.post("/v1/completions", json=COMPLETION, headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        ".",
        ":8000",
        "[evil]",
        "[::1].evil.example",
        "[::1]evil.example:8000",
        "[::1]:8000.evil.example",
        "localhost:8000.evil.example",
        "127.0.0.1:evil",
        "1.2.3",
    ],
)
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


async def test_configured_names_are_allowed_with_any_port() -> None:
    async with http("llama.example", "Box") as client:
        for host, status in (("llama.example", 200), ("box:8000", 200), ("a.llama.example", 403), ("example", 403)):
            assert (await client.get("/props", headers={"Host": host})).status_code == status


async def test_with_keys_any_host_is_allowed() -> None:
    async with http(keys=ApiKeys(digests_of("secret"))) as client:
        headers = {"Host": "llama.example", "Authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


async def test_probes_answer_any_host_without_details() -> None:
    engine = FakeEngine()
    engine.state = Readiness(False, "loading", "rank 0 reads /models/llama")
    async with http(engine=engine) as client:
        assert (await client.get("/health", headers={"Host": "llama"})).status_code == 200
        assert "/models" not in (await client.get("/ready", headers={"Host": "llama"})).text
        assert "/models" in (await client.get("/ready")).text


async def test_no_redirect_is_made_of_a_host() -> None:
    async with http() as client:
        for path in ("/v1/models/../../x", "/health/", "/v1/completions/", "//evil.example/"):
            answer = await client.get(path, headers={"Host": "localhost"})
            assert answer.status_code in (200, 404, 405)
            assert "location" not in answer.headers


def test_names_are_a_list_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerArgs.model_validate({"allowed_hosts": ["a", "b"]}).allowed_hosts == ("a", "b")
    monkeypatch.setenv("LLAMA_ALLOWED_HOSTS", "llama.example, box")
    assert ServerArgs().allowed_hosts == ("llama.example", "box")


@pytest.mark.parametrize("name", ["", " ", ".", "*", "http://box", "box:8000", "a b", "box,"])
def test_a_blank_or_malformed_allowed_host_stops_the_start(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed_hosts") as caught:
        ServerArgs.model_validate({"allowed_hosts": ["box", name]})
    assert "a plain host name without scheme or port" in str(caught.value)


def test_plain_names_and_addresses_are_allowed_hosts() -> None:
    names = ("llama.example", "box_1", "BOX.", "10.1.2.3", "xn--bcher-kva.example")
    assert ServerArgs.model_validate({"allowed_hosts": names}).allowed_hosts == names
