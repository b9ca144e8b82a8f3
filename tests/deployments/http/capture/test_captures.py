"""Stored requests: what is in them, who may read them, and when they are refused."""

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.metrics import Metrics
from deployments.http.app import HttpApp, build_http_app
from deployments.http.capture.folder import CaptureFolder
from llama_core.errors import ConfigError
from llama_core.scheduling.sampling_params import mix_seed
from tests.support.asgi_client import AsgiCall
from tests.support.loop_engine import LoopEngine
from tests.support.scripted_engine import FakeEngine, assert_error

BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


def app_of(engine: FakeEngine, folder: Path | None, *, max_bytes: int = 2**20, keys: str = "") -> HttpApp:
    captures = None if folder is None else CaptureFolder(folder, max_bytes)
    known = ApiKeys(digests_of(keys)) if keys else None
    return build_http_app(engine, Metrics(in_ray=False), captures=captures, keys=known)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def post(app: HttpApp, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    headers = {"x-capture": "1", "x-request-id": "mine"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return await client.post(path, json=body, headers=headers)


async def stored(app: HttpApp, request_id: str = "mine", key: str = "") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return await client.get(f"/captures/{request_id}", headers={"authorization": f"Bearer {key}"} if key else {})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_capture_has_the_request_its_tokens_and_what_they_depend_on(tmp_path: Path, stream: bool) -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine, tmp_path / "captures")
        body = BODY | {"n": 2, "logprobs": 0, "stream": stream, "temperature": 1.0}
        answer = await post(app, body)
        assert answer.status_code == 200
        found = (await stored(app)).json()
        first = engine.tokenizer.encode(BODY["prompt"], bos=True, eos=False)
        assert found["body"] == body and found["route"] == "/v1/completions" and found["prompts"] == [first]
        assert found["outcome"] == "complete" and found["request_id"] == "mine"
        assert [choice["seed"] for choice in found["choices"]] == [found["seed"], mix_seed(found["seed"], 1)]
        assert [len(choice["tokens"]) for choice in found["choices"]] == [8, 8]
        assert [len(choice["logprobs"]) for choice in found["choices"]] == [8, 8]
        assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
        for choice in found["choices"]:
            assert choice["text"] == engine.tokenizer.decode(choice["tokens"])
        assert found["versions"]["python"] and found["versions"]["ray"] != "absent"
        assert found["settings"]["ranks"] == 1 and found["cpu"]["name"]
        again = await post(app, body | {"seed": found["seed"]})
        assert again.status_code == 200
        assert (await stored(app)).json()["choices"] == found["choices"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_a_capture_has_the_leading_space_of_the_answer(tmp_path: Path, stream: bool) -> None:
    app = app_of(FakeEngine("is late"), tmp_path)
    dialog = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    chat = {"messages": dialog, "continue_final_message": True}
    for path, body, text in (
        ("/v1/completions", {"prompt": ["He", "It"], "n": 2}, " is late"),
        ("/v1/chat/completions", chat, " is late"),
        ("/v1/chat/completions", {"messages": dialog[:1]}, "is late"),
    ):
        answer = await post(app, body | {"stream": stream}, path)
        if not stream:
            (choice, *_) = answer.json()["choices"]
            assert choice.get("text", choice.get("message", {}).get("content")) == text
        found = (await stored(app)).json()["choices"]
        assert [each["text"] for each in found] == [text] * (4 if "prompt" in body else 1)


async def test_only_the_servers_user_can_read_the_files(tmp_path: Path) -> None:
    app = app_of(FakeEngine(), tmp_path / "captures")
    assert (await post(app, BODY)).status_code == 200
    assert (await stored(app)).status_code == 200
    (file,) = (tmp_path / "captures").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "captures").stat().st_mode) == 0o700


async def test_a_client_that_leaves_leaves_a_capture_of_what_there_was(tmp_path: Path) -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine, tmp_path)
        body = BODY | {"stream": True, "max_tokens": 500}
        call = AsgiCall(app, "/v1/completions", body, {"x-capture": "1", "x-request-id": "cut"})
        await call.arrived(3)
        await call.leave()
        found = (await stored(app, "cut")).json()
        assert found["outcome"] == "request_cancelled" and len(found["choices"][0]["tokens"]) >= 3
        assert found["choices"][0]["finish_reason"] is None


async def test_a_server_without_a_folder_refuses_and_serves_no_captures() -> None:
    app = app_of(FakeEngine(), None)
    error = assert_error(await post(app, BODY), 403, "capture_not_allowed")
    assert "capture_dir" in str(error["message"]) and error["param"] == "X-Capture"
    assert_error(await stored(app), 404, "not_found")
    for no in ("0", "false", ""):
        assert (await post(app, BODY, x_capture=no)).status_code == 200
    assert_error(await post(app, BODY, x_capture="perhaps"), 400, "invalid_parameter")


async def test_a_full_folder_refuses_and_files_of_others_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"x" * 10_000)
    app = app_of(FakeEngine(), tmp_path, max_bytes=3000)
    for number in range(9):
        answer = await post(app, BODY, x_request_id=str(number))
        if answer.status_code != 200:
            break
        await stored(app, str(number))
    error = assert_error(answer, 403, "capture_not_allowed")
    assert "full" in str(error["message"]) and 1 < number < 9
    assert (await post(app, BODY, x_capture="0")).status_code == 200


async def test_a_capture_belongs_to_its_api_key(tmp_path: Path) -> None:
    app = app_of(FakeEngine(), tmp_path, keys="one,two")
    for key in ("one", "two"):
        body = BODY | {"prompt": f"by {key}"}
        assert (await post(app, body, authorization=f"Bearer {key}")).status_code == 200
    for key in ("one", "two"):
        assert (await stored(app, key=key)).json()["body"]["prompt"] == f"by {key}"
    assert_error(await stored(app, "other", key="one"), 404, "capture_not_found")
    assert (await stored(app)).status_code == 401


async def test_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    app = app_of(FakeEngine(), folder)
    for name in ("../../outside", "..", "x" * 500):
        assert (await post(app, BODY, x_request_id=name)).status_code == 200
    await stored(app, "x" * 128)
    assert (await stored(app, "mine/")).status_code == 404, "no redirect"
    assert names(tmp_path) == ["captures"] and len(names(folder)) == 3


@pytest.mark.parametrize("path", ["/v1/score", "/v1/classify"])
async def test_routes_that_generate_nothing_refuse(tmp_path: Path, path: str) -> None:
    body = {"prompt": "a", "continuations": ["b"], "labels": ["c", "d"]}
    assert_error(await post(app_of(FakeEngine(), tmp_path), body, path), 400, "invalid_parameter")


async def test_a_key_of_a_resumable_stream_is_refused_beside_it(tmp_path: Path) -> None:
    answer = await post(app_of(FakeEngine(), tmp_path), BODY | {"stream": True}, idempotency_key="a")
    assert assert_error(answer, 400, "invalid_parameter")["param"] == "X-Capture"


async def test_a_refused_request_leaves_no_file(tmp_path: Path) -> None:
    assert (await post(app_of(FakeEngine(), tmp_path), BODY | {"top_p": 7})).status_code == 400
    assert not names(tmp_path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_every_api_is_captured(tmp_path: Path, path: str) -> None:
    engine = FakeEngine()
    app = app_of(engine, tmp_path)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
    if path == "/v1/responses":
        body = {"input": "Hi", "max_output_tokens": 40}
    assert (await post(app, body, path)).status_code == 200
    found = json.loads((await stored(app)).text)
    assert found["choices"][0]["text"] == engine.answer and found["route"] == path


def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="capture_dir"):
        CaptureFolder(tmp_path / "file" / "captures", 1)
