"""A request leaves no reference cycles: to collect them takes about a twentieth of a short request's processor time."""

import asyncio
import gc
from functools import cached_property
from typing import Any

import pytest

from deployments.engine.metrics import Metrics
from deployments.http.app import build_http_app
from llama_core.text.answer_format import AnswerFormat
from tests.support.asgi_client import AsgiCall
from tests.support.loop_engine import LoopEngine

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
COMPLETION = ("/v1/completions", {"prompt": "Hello"})


class OneFormatEngine(LoopEngine):
    """Makes its answer format once, as a server does."""

    @cached_property
    def answer_format(self) -> AnswerFormat:
        return super().answer_format


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
async def test_an_answered_request_leaves_no_reference_cycles(
    path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    async with OneFormatEngine().running() as engine:
        app = build_http_app(engine, Metrics(in_ray=False))

        async def ask() -> None:
            call = AsgiCall(app, path, {**body, "max_tokens": 4, "stream": is_streamed}, {})
            await call.end()
            assert call.status == 200 and call.complete
            await asyncio.sleep(0)  # the task that watches for a disconnect ends

        await ask()  # fills caches
        gc.collect()
        gc.disable()
        try:
            await ask()
            assert gc.collect() == 0
        finally:
            gc.enable()
