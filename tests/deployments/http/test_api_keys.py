"""API keys: every route but the probes answers 401 without a valid key."""

import hashlib
import json
import logging
import os
from pathlib import Path

import httpx
import pytest

from deployments import api_keys
from deployments.api_keys import ApiKeys, digests_of
from deployments.args import ServerArgs
from deployments.engine.interface import Readiness
from deployments.http.app import build_http_app
from deployments.http.routing import Access
from deployments.observe.metrics import Metrics
from llama_core.errors import ConfigError
from tests.deployments.http.test_adapter_routes import Loader
from tests.support.http import samples
from tests.support.scripted_engine import MODEL_ID, FakeEngine, in_process

COMPLETION = {"model": MODEL_ID, "prompt": "hi", "max_tokens": 3}


def http(keys: ApiKeys) -> httpx.AsyncClient:
    return in_process(FakeEngine(), keys=keys)


ROUTES = build_http_app(FakeEngine(), Metrics(in_ray=False), loader=Loader()).routes
GUARDED = [(route.method.upper(), route.path) for route in ROUTES if route.access is not Access.ANYONE]


def test_only_the_probes_are_open() -> None:
    assert {route.path for route in ROUTES} - {path for _, path in GUARDED} == {"/health", "/ping", "/ready"}


@pytest.mark.parametrize(("method", "path"), [*GUARDED, ("GET", "/nowhere")])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer " + "k" * 10_000},
        {"Authorization": "Basic not/base64!"},
        {"x-api-key": "secret-1 "},
    ],
    ids=["none", "wrong", "empty", "long", "garbled", "nearly"],
)
async def test_every_route_but_the_probes_wants_a_key(method: str, path: str, headers: dict[str, str]) -> None:
    async with in_process(FakeEngine(), keys=ApiKeys(digests_of("secret-1x,secret-2")), loader=Loader()) as client:
        path = path.replace("{model_id:path}", MODEL_ID)
        answer = await client.request(method, path, headers=headers, json=COMPLETION if method == "POST" else None)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert error.get("code") == (None if path.startswith("/v1/messages") else "invalid_api_key")
    assert "secret" not in answer.text
    assert answer.headers["www-authenticate"].startswith("Basic" if path in ("/", "/docs") else "Bearer")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer secret-2"},
        {"Authorization": "bearer  secret-2"},
        {"x-api-key": "secret-2"},
        {"Authorization": "Basic dXNlcjpzZWNyZXQtMg=="},
    ],
    ids=["bearer", "spaces", "x-api-key", "basic"],
)
async def test_every_way_to_send_a_valid_key_is_accepted(headers: dict[str, str]) -> None:
    async with http(ApiKeys(digests_of(" secret-1 , secret-2,"))) as client:
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200
        assert (await client.get("/version", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("api_keys", "key", "reads"),
    [("one,two", "one", False), ("one,two", "admin", True), ("one", "one", True), ("", "", True), ("", "one", True)],
)
async def test_of_several_keys_only_an_admins_reads_what_all_have_used(api_keys: str, key: str, reads: bool) -> None:
    keys, admin_keys = ApiKeys(digests_of(api_keys)), ApiKeys(digests_of("admin"))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with in_process(FakeEngine(), keys=keys, admin_keys=admin_keys) as client:
        metrics = await client.get("/metrics", headers=headers)
        props = (await client.get("/props", headers=headers)).json()
    assert metrics.status_code == (200 if reads else 403)
    assert reads or metrics.json()["error"]["code"] == "admin_key_required"
    assert props["max_batch_size"] == 8, "and every key reads the limits"
    counts = {"blocks_used", "prefix_cache_hit_tokens", "draft_tokens", "draft_tokens_accepted"}
    assert counts & props.keys() == (counts if reads else set())


def test_a_second_key_in_the_file_makes_several(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")
    assert not ApiKeys((), tmp_path / "keys").are_several
    assert not ApiKeys(digests_of("one"), tmp_path / "keys").are_several, "the same key twice"
    assert ApiKeys(digests_of("two"), tmp_path / "keys").are_several


async def test_probes_need_no_key_and_without_configured_keys_no_route_does() -> None:
    async with http(ApiKeys(digests_of("secret"))) as client:
        assert [(await client.get(path)).status_code for path in ("/health", "/ping", "/ready")] == [200, 200, 200]
        assert (await client.post("/ping")).status_code == 200
    async with http(ApiKeys()) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


def test_the_key_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.0)
    file = tmp_path / "keys"
    file.write_bytes("# of the team\n\n  first \nsecond\nschlüssel\n".encode() + b"\xff\xfe\n")
    keys = ApiKeys(digests_of("fixed"), file)
    assert all(keys.owner_of(key.encode()) for key in ("first", "second", "fixed"))
    assert len({keys.owner_of(key.encode()) for key in ("first", "second", "fixed")}) == 3
    assert keys.owner_of("schlüssel".encode()) and keys.owner_of(b"\xff\xfe"), "any bytes will do"
    assert not keys.owner_of(b"# of the team") and not keys.owner_of(b"")
    file.write_text("second\nthird\n")
    os.utime(file, ns=(1, 1))
    assert [bool(keys.owner_of(key.encode())) for key in ("first", "second", "third", "fixed")] == [
        False,
        True,
        True,
        True,
    ]
    for change in (lambda: file.write_text("\n"), file.unlink):
        change()
        assert [bool(keys.owner_of(key.encode())) for key in ("first", "second")] == [False, True], (
            "the previous keys stay valid"
        )


@pytest.mark.parametrize("content", [None, "# nothing\n"], ids=["missing", "empty"])
def test_a_key_file_without_keys_stops_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys((), file)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_a_key_file_of_an_editor_with_byte_order_marks_has_its_keys_or_stops_the_start(
    tmp_path: Path, encoding: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes("first\r\n# comment\r\nsecond\r\n".encode(encoding))
    if encoding != "utf-8-sig":
        with pytest.raises(ConfigError, match=f"^api_key_file: {file}: not text in UTF-8: save it again in UTF-8$"):
            ApiKeys(file=file)
    else:
        keys = ApiKeys(file=file)
        assert keys.owner_of(b"first") and keys.owner_of(b"second") and len(keys._from_file) == 2


def test_keys_of_the_environment_become_digests_where_the_application_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEYS", "first, second")
    args = ServerArgs()
    assert args.api_key_digests == digests_of("first,second") and len(args.api_key_digests) == 2
    monkeypatch.delenv("LLAMA_API_KEYS")
    with pytest.raises(ValueError, match="api_key_digests"):
        ServerArgs(api_key_digests=("a key in plain text",))
    assert "first" not in args.model_dump_json(), "Serve shows an application's arguments"
    keys = ApiKeys(args.api_key_digests)
    assert keys.are_required and keys.owner_of(b"second") and not keys.owner_of(b"third")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [*(("LLAMA_API_KEYS", value, "LLAMA_API_KEYS is set, but has no key in it") for value in ("", " ", " , ", "\n")),
     *(("LLAMA_API_KEY_FILE", value, "api_key_file") for value in ("", " ", "\t"))],
)  # fmt: skip
def test_an_empty_list_of_keys_or_path_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=says):
        ServerArgs()


async def test_details_of_a_failure_need_a_key() -> None:
    engine = FakeEngine()
    engine.state = Readiness(False, "failed", "FileNotFoundError: /models/secret-place")
    engine.alive = False
    async with in_process(engine, keys=ApiKeys(digests_of("key"))) as client:
        for path in ("/health", "/ready"):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 503 and "secret-place" not in answer.text
            assert "secret-place" in (await client.get(path, headers={"Authorization": "Bearer key"})).text
        assert (await client.get("/ready")).json()["phase"] == "failed"


async def test_a_request_belongs_to_its_key_and_without_keys_to_its_user() -> None:
    body = {**COMPLETION, "user": "u" * 100, "priority": 3}
    engine, keys = FakeEngine(), ApiKeys(digests_of("one,two"))
    async with in_process(engine, keys=keys) as client:
        for key in ("one", "two", "one"):
            await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    owners = [owner for owner, _ in engine.owners]
    assert owners[0] == owners[2] != owners[1] and "one" not in owners[0] and "u" * 10 not in owners[0]
    engine = FakeEngine()
    async with in_process(engine) as client:
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json=COMPLETION)
        refused = await client.post("/v1/completions", json={**COMPLETION, "priority": -1})
        score = {"prompt": "a", "continuations": ["b"], "user": "ann", "priority": 2}
        await client.post("/v1/score", json=score)
    assert engine.owners == [("u" * 64, 3), ("", 0), ("ann", 2)] and refused.status_code == 400


async def test_refused_keys_are_counted_and_the_log_names_the_owner_but_never_a_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="llama.requests")
    engine, metrics = FakeEngine(), Metrics(in_ray=False)
    async with in_process(engine, metrics, keys=ApiKeys(digests_of("secret-1"))) as client:
        for path in ("/v1/completions", "/metrics", "/nobody/knows/1", "/nobody/knows/2"):
            refused = await client.get(path, headers={"Authorization": "Bearer secret-0", "X-Request-ID": "r1"})
            assert refused.status_code == 401
        for body in (COMPLETION, COMPLETION | {"temperature": -1}):
            await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer secret-1"})
    seen = samples(metrics.render())
    for path, count in (("/v1/completions", 1.0), ("/metrics", 1.0), ("other", 2.0)):
        assert seen[f'llama_requests_total{{outcome="invalid_api_key",path="{path}"}}'] == count
    assert seen['llama_requests_total{outcome="ok",path="/v1/completions"}'] == 1
    lines = [json.loads(record.getMessage().removeprefix("request ")) for record in caplog.records]
    assert [(line["outcome"], line.get("owner")) for line in lines] == [
        *[("invalid_api_key", None)] * 4,
        ("ok", digests_of("secret-1")[0][:12]),
        ("invalid_parameter", digests_of("secret-1")[0][:12]),
    ]
    assert lines[0]["request_id"] == "r1" and "secret" not in caplog.text and "nobody" not in caplog.text


async def test_without_keys_the_log_has_a_digest_of_the_user_and_never_the_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="llama.requests")
    async with in_process(FakeEngine()) as client:
        for user in ({}, {"user": "team\r\nforged"}):
            await client.post("/v1/completions", json=COMPLETION | user)
    lines = [record.getMessage() for record in caplog.records if record.name == "llama.requests"]
    digest = hashlib.sha256(b"team\r\nforged").hexdigest()[:12]
    assert [json.loads(line.removeprefix("request ")).get("owner") for line in lines] == [None, digest]
    assert "team" not in caplog.text
