"""The API by handle, on the deployment's class over a fake group, without Serve."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from deployments.observe.replica_log import log_like_serve
from llama_core.errors import InvalidDialog, InvalidParameter, QueueFull
from tests.deployments.handles import ingress_over
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import continuation
from tests.support.http import samples


@pytest.fixture
async def ingress() -> AsyncIterator[Any]:
    """An ingress with 2 slots and a queue of 3."""
    made = ingress_over(FakeGroup(), max_seq_len=64, max_batch_size=2, max_queue=3)
    await made.service.start()
    yield made
    await made.service.stop()


def counted(ingress: Any) -> dict[str, float]:
    return samples(ingress.metrics.render())


async def test_a_call_with_more_prompts_than_the_queue_holds_waits_for_its_own_prompts(ingress: Any) -> None:
    prompts = [[1, 3 + n] for n in range(40)]
    tokens, _ = await ingress.generate(prompts, 6, temperature=0)
    assert tokens == [continuation(prompt, 6) for prompt in prompts]
    assert ingress.service.describe().blocks_used == 0


async def test_a_call_is_refused_while_others_fill_the_queue(ingress: Any) -> None:
    others = asyncio.create_task(ingress.generate([[1, 5]] * 5, 60, temperature=0))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await ingress.generate([[1, 6]], 4, temperature=0)
    assert len((await others)[0]) == 5


async def test_calls_by_handle_are_counted_by_outcome_and_timed(ingress: Any) -> None:
    await ingress.generate([[1, 5], [1, 6]], 4, temperature=0)
    async for _ in ingress.stream([1, 5], 0, max_gen_len=4):
        pass
    with pytest.raises(InvalidParameter):
        await ingress.generate([[1, 10**6]], 4)
    leaving = asyncio.create_task(ingress.generate([[1, 9]], 60, temperature=0))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    seen = counted(ingress)
    assert seen['llama_requests_total{outcome="ok",path="handle"}'] == 2
    assert seen['llama_requests_total{outcome="invalid_parameter",path="handle"}'] == 1
    assert seen['llama_requests_total{outcome="cancelled",path="handle"}'] == 1
    assert seen["prefill_time_ms_count"] == 2
    assert ingress.service.describe().blocks_used == 0


async def test_an_invalid_dialog_is_counted(ingress: Any) -> None:
    with pytest.raises(InvalidDialog):
        await ingress.chat_completion([[{"role": "assistant", "content": "first"}]])
    assert counted(ingress)["invalid_dialog_assertions_count"] == 1


async def test_a_stream_accepts_text_token_ids_or_a_dialog_only(ingress: Any) -> None:
    for prompt in ("hi", [1, 5], [{"role": "user", "content": "bye"}]):
        pieces = [piece async for piece in ingress.stream(prompt, 0, max_gen_len=4)]
        assert pieces[-1]["finish_reason"] in ("length", "stop")
    with pytest.raises(InvalidParameter, match="prompt"):
        _ = [piece async for piece in ingress.stream(["a", "b"], 0)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("seed", 2**64)],
)  # fmt: skip
async def test_an_invalid_value_by_handle_is_named_and_harms_no_other_call(
    ingress: Any, field: str, value: float
) -> None:
    other = asyncio.create_task(ingress.generate([[1, 5]], 20, temperature=0))
    await asyncio.sleep(0)
    with pytest.raises(InvalidParameter, match=field):
        await ingress.generate([[1, 6], [1, 7]], 4, **{"temperature": 0.5} | {field: value})
    with pytest.raises(InvalidParameter, match=field):
        await anext(ingress.stream([1, 6], **{"temperature": 0.5} | {field: value}))
    assert (await other)[0] == [continuation([1, 5], 20)]
    assert ingress.service.describe().blocks_used == 0


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def replica_log() -> Iterator[list[logging.LogRecord]]:
    """The records that a replica's log handlers get. Restores every logger."""
    names = ("ray.serve", "llama", "llama_core", "cluster", "deployments")
    loggers = [logging.getLogger(name) for name in names]
    before = [(log.handlers, log.level, log.propagate, log.filters) for log in loggers]
    kept = Kept()
    loggers[0].handlers, loggers[0].filters = [kept], []
    log_like_serve()
    yield kept.records
    for logger, (handlers, level, propagate, filters) in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate, logger.filters = handlers, level, propagate, filters


async def call_as_serve_does(call: Any) -> None:
    """Serve 2.60's replica logs every exception of a call before it raises it."""
    try:
        await call
    except Exception:
        logging.getLogger("ray.serve").exception("Request failed.")
    for handler in logging.getLogger("llama").handlers:
        handler.flush()


async def test_a_callers_mistake_by_handle_is_one_line_and_no_error(
    ingress: Any, replica_log: list[logging.LogRecord]
) -> None:
    mistakes = (
        ingress.generate([[1, 10**6]], 4),
        ingress.generate([[1, 5]], 4, temperature=-1.0),
        ingress.chat_completion([[{"role": "assistant", "content": "first"}]]),
        ingress.text_completion(["hi"], max_gen_len=-1),
        anext(ingress.stream(["a", "b"])),
    )
    for mistake in mistakes:
        replica_log.clear()
        await call_as_serve_does(mistake)
        (record,) = replica_log
        assert record.levelno == logging.INFO and record.exc_info is None
        assert '"outcome": "invalid_' in record.getMessage()


async def test_an_internal_error_by_handle_is_logged_with_its_place_only(
    ingress: Any, replica_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prompt: list[int], *_: object, **__: object) -> None:
        raise RuntimeError(f"bad prompt {prompt}")

    monkeypatch.setattr(ingress.service, "submit", broken)
    await call_as_serve_does(ingress.generate([[1, 5]], 4))
    (logged,) = [record for record in replica_log if "Request failed" in record.getMessage()]
    text = logging.Formatter().format(logged)
    assert logged.levelno == logging.ERROR
    assert "in broken" in text and text.endswith("RuntimeError") and "[1, 5]" not in text
