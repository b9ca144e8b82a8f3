"""The request log writes every line, in batches and in order."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from deployments.http.request_log import MOST_IN_A_BATCH, Batched


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
    monkeypatch.setattr("deployments.http.request_log.BATCH_S", 0.01)
    log.info("one")
    log.warning("two")
    assert seen.lines == []
    await asyncio.sleep(0.05)
    assert seen.lines == ["one", "two"]


async def test_an_error_is_written_at_once_after_the_lines_before_it(log: logging.Logger, seen: Seen) -> None:
    log.info("one")
    log.error("two")
    assert seen.lines == ["one", "two"]


async def test_a_batch_has_a_limit(log: logging.Logger, seen: Seen) -> None:
    for i in range(MOST_IN_A_BATCH + 1):
        log.info("line %d", i)
    assert len(seen.lines) == MOST_IN_A_BATCH
    log.handlers[0].flush()
    assert seen.lines == [f"line {i}" for i in range(MOST_IN_A_BATCH + 1)]


def test_without_an_event_loop_each_line_is_written_at_once(log: logging.Logger, seen: Seen) -> None:
    log.info("one")
    assert seen.lines == ["one"]
