"""Sends an answer that is not streamed, and ends it for a client that does not read."""

import asyncio
import logging
from typing import Final

from starlette.types import Send

from llama_core.errors import RequestCancelled

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 * 2**10  # that the server buffers for a client that does not read


async def send_whole(body: bytes, send: Send, timeout_s: float) -> None:
    """Send `body`, which is JSON, in pieces.

    Raises RequestCancelled when the client reads nothing for `timeout_s`."""
    head = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    begin, end = 0, len(body)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await send({"type": "http.response.start", "status": 200, "headers": head})
            while True:
                piece, begin = body[begin : begin + PIECE_BYTES], begin + PIECE_BYTES
                await send({"type": "http.response.body", "body": piece, "more_body": begin < end})
                if begin >= end:
                    return
                limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
    except TimeoutError:
        log.warning("a client did not read its answer for %g s; it was cut off", timeout_s)
        raise RequestCancelled("the client did not read its answer") from None
