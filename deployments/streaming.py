"""Server-sent events: a request's deltas as OpenAI's chunks, and a response that ends when its client leaves.

An error before the first token is a proper HTTP status (see `http.py`); after that it is a chunk with `error`, and no
[DONE] follows, so no client can take half an answer for a whole one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.choices import Choices, unless_disconnected
from deployments.openai_format import PING, Reply, event
from deployments.problems import as_llama_error, error_object
from deployments.request_log import RequestRecord
from llama_core.errors import LlamaError, RequestCancelled

log = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def events(choices: Choices, reply: Reply, record: RequestRecord, ping_s: float) -> AsyncGenerator[bytes]:
    """The whole body of one streamed answer."""
    try:
        while choices.num_open:
            item = await choices.next(ping_s)
            if item is None:
                yield PING
                continue
            record.delta(item[1])
            if chunk := reply.chunk(*item):
                yield chunk
        record.succeeded()
        yield reply.ending()
    except Exception as error:
        record.failed(error)
        if not isinstance(error, LlamaError):
            log.exception("a stream failed, request %s", record.request_id)
        yield event(error_object(as_llama_error(error)))


class EventStream(Response):
    """Sends events as they come; stops when the client leaves or does not read. `on_close` is called in every case."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, body: AsyncGenerator[bytes], on_close: Callable[[], None], send_timeout_s: float) -> None:
        super().__init__(None, headers=HEADERS)
        del self.headers["content-length"]
        self._events = body
        self._on_close = on_close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._deliver(send))
        except RequestCancelled:
            pass
        except TimeoutError:
            log.warning("a client did not read its stream for %g s; it was cut off", self._send_timeout_s)
        finally:
            self._on_close()

    async def _deliver(self, send: Send) -> None:
        async with aclosing(self._events) as chunks:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in chunks:
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
