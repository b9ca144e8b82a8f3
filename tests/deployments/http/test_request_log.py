"""The request log writes every line, in batches and in order; no line has a prompt unless that is asked for."""

import json
import logging
from typing import Any

import pytest

from deployments.observe.replica_log import Batched
from llama_core.log_lines import JsonFormatter, SubjectFilter
from tests.support import http
from tests.support.scripted_engine import FakeEngine, serve
from tests.support.waiting import until_true


class Written(logging.Handler):
    """Each line as JSON and as text, with the id of its request."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(SubjectFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [JsonFormatter().format(record), logging.Formatter().format(record)]


@pytest.fixture
def seen() -> Written:
    return Written()


@pytest.fixture
def log(seen: Written) -> logging.Logger:
    logger = logging.Logger("tests.batched", logging.INFO)
    logger.addHandler(Batched([seen]))
    return logger


async def test_lines_are_written_in_batches_in_their_order(
    log: logging.Logger, seen: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.observe.replica_log.BATCH_S", 0.01)
    log.info("one")
    log.warning("two")
    assert seen.lines == []
    await until_true("a batch is written", lambda: seen.lines)
    assert seen.lines[1::2] == ["one", "two"]


async def test_an_error_is_written_at_once_after_the_lines_before_it(log: logging.Logger, seen: Written) -> None:
    log.info("one")
    log.error("two")
    assert seen.lines[1::2] == ["one", "two"]


SECRET = "xylophone\r\nERROR forged line"


@pytest.fixture
def lines(seen: Written, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the server's loggers write."""
    for name in ("llama", "deployments"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [seen])
        monkeypatch.setattr(logger, "level", logging.INFO)
        monkeypatch.setattr(logger, "propagate", False)
    return seen.lines


def test_no_line_has_a_prompt_after_any_error(lines: list[str]) -> None:
    engine = FakeEngine()
    with serve(engine) as served:
        url = served.url + "/v1/completions"
        bodies: list[dict[str, Any]] = [
            {"prompt": SECRET, "temperature": -1}, {"prompt": [SECRET], "max_tokens": 10**30}, {"prompt": SECRET * 999},
            *({"prompt": "x", name: SECRET} for name in ("temperature", "model")), {"prompt": {SECRET: SECRET}}, {SECRET: 1},
            {"prompt": "x", "stop": [SECRET * 99]}, {"prompt": "x", "response_format": {"type": SECRET}},
            {"prompt": "x", "logit_bias": {SECRET: 1}},
        ]  # fmt: skip
        for body in bodies:
            answer = http.post(url, json=body, headers={"x-request-id": "a b\tc;<script>"})
            assert answer.status_code in (400, 404) and SECRET[:9] not in answer.text
            assert answer.headers["x-request-id"] == "abcscript"
        assert http.post(url, content=SECRET.encode()).status_code == 415
        head = {"content-type": "application/json"}
        assert http.post(url, content=SECRET.encode(), headers=head).status_code == 400
        engine.fail_at = (1, ValueError(f"the model cannot read {SECRET}"))
        ids = {"x-request-id": "broken"}
        assert http.post(url, json={"prompt": SECRET}, headers=ids).status_code == 500
        ids = {"x-request-id": "broken-stream"}
        assert "error" in http.post(url, json={"prompt": SECRET, "stream": True}, headers=ids).text
    assert not any(SECRET[:9] in line or "\r" in line for line in lines)
    parsed = [json.loads(line) for line in lines[::2]]
    for request_id in ("broken", "broken-stream"):
        own = [line for line in parsed if line.get("request_id") == request_id]
        assert {line["message"] == "request" for line in own} == {True, False}, "its outcome, and where it was raised"
        assert any("ValueError" in line["message"] for line in own)
        assert [line["outcome"] for line in own if line["message"] == "request"] == ["internal_error"]
    assert all("request_id" in line for line in parsed)


def test_prompts_are_logged_only_where_that_is_asked_for(lines: list[str]) -> None:
    with serve(FakeEngine(), log_prompts=True) as served:
        body = {"prompt": [SECRET, "second"], "max_tokens": 2}
        assert http.post(served.url + "/v1/completions", json=body).status_code == 200
    (line,) = (json.loads(line) for line in lines if line.startswith("{"))
    assert line["prompts"] == [SECRET, "second"]
