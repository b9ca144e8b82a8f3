"""The request log writes every line, in batches and in order; no line has a prompt unless that is asked for."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from deployments.observe.replica_log import Batched
from llama_core.log_lines import JsonFormatter, SubjectFilter
from tests.support import http
from tests.support.scripted_engine import FakeEngine, serve


class Seen(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def log(seen: Seen) -> Iterator[logging.Logger]:
    logger = logging.getLogger("tests.batched")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [Batched([seen])]
    yield logger
    logger.handlers = []


async def test_lines_are_written_in_batches_in_their_order(
    log: logging.Logger, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.observe.replica_log.BATCH_S", 0.01)
    log.info("one")
    log.warning("two")
    assert seen.lines == []
    await asyncio.sleep(0.05)
    assert seen.lines == ["one", "two"]


async def test_an_error_is_written_at_once_after_the_lines_before_it(log: logging.Logger, seen: Seen) -> None:
    log.info("one")
    log.error("two")
    assert seen.lines == ["one", "two"]


SECRET = "xylophone"


@pytest.fixture
def lines() -> Iterator[Callable[[], list[str]]]:
    """What the server's loggers have written so far, as text and as JSON, each line with the id of its request."""
    seen = Written()
    loggers = [logging.getLogger(name) for name in ("llama", "deployments")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(seen)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    yield lambda: list(seen.lines)
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.removeHandler(seen)
        logger.setLevel(level)
        logger.propagate = propagate


class Written(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(SubjectFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [JsonFormatter().format(record), logging.Formatter().format(record)]


def test_no_line_has_a_prompt_after_any_error(lines: Callable[[], list[str]]) -> None:
    engine = FakeEngine()
    with serve(engine) as served:
        url = served.url + "/v1/completions"
        for body in (
            {"prompt": SECRET, "temperature": -1},
            {"prompt": [SECRET]},
            {SECRET: 1},
            {"prompt": SECRET * 999},
        ):
            assert http.post(url, json=body).status_code in (200, 400)
        assert http.post(url, content=SECRET.encode()).status_code == 415
        head = {"content-type": "application/json"}
        assert http.post(url, content=SECRET.encode(), headers=head).status_code == 400
        engine.fail_at = (1, ValueError(f"the model cannot read {SECRET}"))
        ids = {"x-request-id": "broken"}
        assert http.post(url, json={"prompt": SECRET}, headers=ids).status_code == 500
        ids = {"x-request-id": "broken-stream"}
        assert "error" in http.post(url, json={"prompt": SECRET, "stream": True}, headers=ids).text
    written = lines()
    assert not any(SECRET in line for line in written)
    parsed = [json.loads(line) for line in written[::2]]
    for request_id in ("broken", "broken-stream"):
        own = [line for line in parsed if line.get("request_id") == request_id]
        assert {line["message"] == "request" for line in own} == {True, False}, "its outcome, and where it was raised"
        assert any("ValueError" in line["message"] for line in own)
        assert [line["outcome"] for line in own if line["message"] == "request"] == ["internal_error"]
    assert all("request_id" in line for line in parsed)


def test_prompts_are_logged_only_where_that_is_asked_for(lines: Callable[[], list[str]]) -> None:
    with serve(FakeEngine(), log_prompts=True) as served:
        body = {"prompt": [SECRET, "second"], "max_tokens": 2}
        assert http.post(served.url + "/v1/completions", json=body).status_code == 200
    (line,) = (json.loads(line) for line in lines() if line.startswith("{"))
    assert line["prompts"] == [SECRET, "second"]
