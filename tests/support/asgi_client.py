"""A client of an ASGI application in the test's own event loop, which can leave after any message of the answer."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """One request. `ended` once the application has returned; `complete` if it has sent the whole answer."""

    def __init__(
        self, app: ASGIApp, path: str, body: dict[str, Any] | bytes, headers: dict[str, str], *, has_more: bool = False
    ) -> None:
        """has_more: of the body, which never arrives."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", "host": "127.0.0.1"} | headers
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }
        self._unread: list[Message] = [{"type": "http.request", "body": raw, "more_body": has_more}]
        self._left = asyncio.Event()
        self._news = asyncio.Event()
        self.status = 0
        self.body = b""
        self.complete = False
        self._task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._unread:
            return self._unread.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.complete = not message.get("more_body", False)
        self._news.set()
        await asyncio.sleep(0)

    @property
    def ended(self) -> bool:
        return self._task.done()

    @property
    def events(self) -> list[bytes]:
        """The events that have arrived, without comments."""
        return [event for event in self.body.split(b"\n\n")[:-1] if not event.startswith(b":")]

    async def arrived(self, num_events: int) -> list[bytes]:
        """The events, once there are so many of them, or the answer has ended."""
        async with asyncio.timeout(60):
            while len(self.events) < num_events and not self.ended:
                self._news.clear()
                waiting = asyncio.ensure_future(self._news.wait())
                await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        return self.events

    async def leave(self) -> None:
        """Disconnect, and wait until the application has returned."""
        self._left.set()
        await self.end()

    async def end(self) -> list[bytes]:
        """The events, once the application has returned."""
        async with asyncio.timeout(60):
            await asyncio.wait((self._task,))
        self._task.result()
        return self.events

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found
