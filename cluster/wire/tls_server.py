"""Listens with TLS, and counts connections before they have shaken hands: each of them keeps 20 KB until it does."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

HANDSHAKE_S: Final = 30.0  # between busy processes
MAX_WAITING: Final = 256  # connections that shake hands; one more ends the oldest


class TlsListener:
    """Listens at a port that the kernel picks."""

    def __init__(self, make: Callable[[], asyncio.Protocol], host: str, context: ssl.SSLContext) -> None:
        """make: the protocol of a connection that has shaken hands. Raises OSError."""
        self._make, self._context = make, context
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=MAX_WAITING)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._accepting = asyncio.create_task(self._accept())
        self._accepting.add_done_callback(lambda _: self._socket.close())

    def close(self) -> None:
        for task in (self._accepting, *self._waiting):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:  # too many open files
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(self._shake_hands(connection))
            self._waiting[task] = None
            task.add_done_callback(lambda done: self._waiting.pop(done, None))
            if len(self._waiting) > MAX_WAITING:
                oldest = next(iter(self._waiting))
                oldest.cancel()
                self._waiting.pop(oldest)

    async def _shake_hands(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # TimeoutError and ssl.SSLError are among them
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
