"""Around every request: its id, and an answer in the usual shape whatever went wrong inside."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.problems import as_llama_error, error_response
from llama_core.errors import LlamaError

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128


def clean_request_id(given: str | None) -> str:
    """What a client sent as X-Request-ID, without what could confuse a log or a header; a new one if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given or "")[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex


class RequestScope:
    """Sets `request.state.request_id`, answers it as X-Request-ID, and answers an exception that nobody has handled: by what it
    says if it is one of ours, else as a 500.

    `sends_id` is False behind a server that adds the header itself, as Ray Serve does: two would read as "abc, abc".

    Here rather than in an exception handler of Starlette's: those raise it again, for a server to print.
    """

    def __init__(self, app: ASGIApp, sends_id: bool = True) -> None:
        self._app = app
        self._sends_id = sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._sends_id:
                    MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not isinstance(error, LlamaError):
                log.exception("unhandled exception, request %s", request_id)
            if not started:
                await error_response(as_llama_error(error))(scope, receive, send_with_id)
