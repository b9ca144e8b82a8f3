"""Gives every request an id, and answers every exception in the shape of the path's API."""

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.errors import exception_response, is_anthropic
from llama_core.errors import LlamaError
from llama_core.log_lines import LogSubject, log_subject, where

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout-seconds"
MOVED_TIMEOUT_HEADER = "x-llama-timeout-seconds"  # the same value under a name that Serve ignores
MAX_REQUEST_ID_CHARS = 128
LINGER_S, LINGER_BYTES = 5.0, 16 * 2**20


_KEY = "llama.headers"


def headers_of(scope: Scope) -> Mapping[str, str]:
    """The headers of a request by names in lower case, decoded once: Starlette decodes them again at every look.

    Of several with one name the first counts, as in Starlette's `Headers`.
    """
    state: dict[str, object] = scope.setdefault("state", {})
    found = state.get(_KEY)
    if found is None:
        found = state[_KEY] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(scope["headers"]))
        }
    assert isinstance(found, dict)
    return found


def clean_request_id(given: str | None) -> str:
    """The client's X-Request-ID without characters that could confuse a log or a header; a new id if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given or "")[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex


class RequestScope:
    """Sets `request.state.request_id`, sends it as X-Request-ID, and answers every exception: a LlamaError by its own code,
    any other as a 500.

    `sends_id` is False behind a server that adds the header itself, as Ray Serve does: clients would join both to "abc, abc".

    A connection whose request was answered before its body had arrived is closed. The rest of the body is read and dropped
    for LINGER_S first: a client that sends all of it before it reads would otherwise lose the answer.
    """

    def __init__(self, app: ASGIApp, sends_id: bool = True) -> None:
        self._app = app
        self._sends_id = sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = headers_of(scope)
        request_id = clean_request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        log_subject.set(LogSubject(request_id))
        # The head announces a body.
        is_unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        started = lingers = False
        names_id = is_anthropic(scope)

        async def receive_body() -> Message:
            nonlocal is_unread
            message = await receive()
            if not message.get("more_body"):
                is_unread = False
            return message

        async def linger() -> None:
            num_bytes = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while is_unread and num_bytes < LINGER_BYTES:
                        num_bytes += len((await receive_body()).get("body", b""))

        async def send_with_id(message: Message) -> None:
            nonlocal started, lingers
            if message["type"] == "http.response.start":
                started, lingers = True, is_unread
                if self._sends_id:
                    MutableHeaders(scope=message)["X-Request-ID"] = request_id
                if names_id:
                    MutableHeaders(scope=message)["request-id"] = request_id  # the header that Anthropic's clients read
                if lingers:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif lingers and not message.get("more_body"):
                await send({**message, "more_body": True})
                await linger()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, receive_body, send_with_id)
        except Exception as error:
            if not isinstance(error, LlamaError | HTTPException):
                log.error("unhandled exception, request %s\n%s", request_id, where(error))
            if not started:
                await exception_response(error, scope)(scope, receive_body, send_with_id)
