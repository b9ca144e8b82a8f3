"""Connects a driver with its ranks: where it listens, how a rank proves that it belongs. Knows no steps and no Ray.

All ranks on the driver's node: a unix socket in a private directory that is gone as soon as the last rank has
connected. Ranks elsewhere: TCP with TLS, both sides pinned to the group's own key. Either way the first frame is a
`Hello` with the group's secret, and a connection that begins otherwise is closed.
"""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

from cluster.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    Deframer,
    FrameSocket,
    Hello,
    WireError,
    decode_hello,
)
from cluster.wire.socket_dir import SocketDir
from cluster.wire.tls import GroupKey, make_group_key, tls_context

logger = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a rank needs to connect, for a Ray call to carry. Either `path`, or `host` and `port` and `key`."""

    epoch: int
    secret: bytes = field(repr=False)
    path: str | None = None
    host: str = ""
    port: int = 0
    key: GroupKey | None = None


def connect(invitation: Invitation, rank: int, timeout_s: float) -> FrameSocket:
    """The rank's side: a connection that has said `Hello`, without a timeout from then on. Raises OSError
    (ssl.SSLError).
    """
    if invitation.path is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        connection.connect(invitation.path)
    else:
        connection = socket.create_connection((invitation.host, invitation.port), timeout_s)
        # A step is a small write that must not wait for the last one's acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert invitation.key is not None
        connection = tls_context(invitation.key, "rank").wrap_socket(connection)
    frames = FrameSocket(connection)
    frames.send(Hello(invitation.epoch, rank, invitation.secret))
    connection.settimeout(None)
    return frames


class RankConnection(asyncio.Protocol):
    """The driver's end of one rank's connection. `on_payload` and `on_closed` are set by whoever sends steps.

    `on_closed` gets the reason in words, and is called once, also for a connection closed before it was set.
    """

    def __init__(self, listener: "RankListener") -> None:
        self._listener = listener
        self._deframer = Deframer(MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._closed: str | None = None
        self._on_payload: Callable[[bytes], None] | None = None
        self._on_closed: Callable[[str], None] | None = None
        self.rank: int | None = None

    def attend(self, on_payload: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        self._on_payload = on_payload
        self._on_closed = on_closed
        if self._closed is not None:
            on_closed(self._closed)

    def write(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frame)

    def close(self) -> None:
        """Closes without calling `on_closed`."""
        self._on_closed = None
        self._on_payload = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        self._listener.unproven.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._deframer.feed(data):
                if self.rank is None:
                    self.rank = self._listener.admit(self, decode_hello(payload))
                    self._deframer.max_frame_bytes = MAX_FRAME_BYTES
                elif self._on_payload is not None:
                    self._on_payload(payload)
        except WireError as error:
            self._end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost ({exc})" if exc else "connection closed")

    def _end(self, reason: str) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        if self._transport is not None:
            self._transport.abort()
        if self.rank is None:
            self._listener.unproven.discard(self)
            logger.warning("refused a connection to a rank group: %s", reason)
        elif self._on_closed is not None:
            self._on_closed(reason)


class RankListener:
    """Takes one connection from each rank of one start of a group, then stops listening.

    `host` None: a unix socket. Else the address to listen at, with TLS, on a port that the kernel picks.
    """

    def __init__(self, epoch: int, world_size: int, host: str | None) -> None:
        self._epoch = epoch
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._host = host
        self._server: asyncio.Server | None = None
        self._dir: SocketDir | None = None
        self._connections: list[RankConnection | None] = [None] * world_size
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unproven: set[RankConnection] = set()

    async def open(self) -> Invitation:
        """Starts to listen. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._host is None:
            self._dir = SocketDir()
            path = self._dir.socket_path
            self._server = await loop.create_unix_server(lambda: RankConnection(self), path)
            return Invitation(self._epoch, self._secret, path=path)
        key = make_group_key()
        self._server = await loop.create_server(
            lambda: RankConnection(self), self._host, 0, ssl=tls_context(key, "driver"), ssl_handshake_timeout=30
        )
        port = self._server.sockets[0].getsockname()[1]
        return Invitation(self._epoch, self._secret, host=self._host, port=port, key=key)

    def admit(self, connection: RankConnection, hello: Hello) -> int:
        """The rank that `connection` has proven to be. Raises WireError."""
        if not hmac.compare_digest(hello.secret, self._secret):
            raise WireError("the secret is not the group's")
        if hello.epoch != self._epoch:
            raise WireError(f"epoch {hello.epoch} said hello in epoch {self._epoch}")
        if not 0 <= hello.rank < len(self._connections) or self._connections[hello.rank] is not None:
            raise WireError(f"rank {hello.rank} is not expected")
        self.unproven.discard(connection)
        self._connections[hello.rank] = connection
        if None not in self._connections and not self._complete.done():
            self._complete.set_result(None)
        return hello.rank

    @property
    def missing_ranks(self) -> list[int]:
        """Those that have not said a proper hello."""
        return [rank for rank, connection in enumerate(self._connections) if connection is None]

    async def connections(self) -> list[RankConnection]:
        """One for each rank, in their order, once all are there; nothing listens any more and no file is left."""
        await self._complete
        self.stop_listening()
        return [connection for connection in self._connections if connection is not None]

    def stop_listening(self) -> None:
        """Closes the listening socket and whatever has not said a proper hello. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._dir is not None:
            self._dir.remove()
            self._dir = None
        for connection in list(self.unproven):
            connection.close()
        self.unproven.clear()

    def close(self) -> None:
        """`stop_listening`, and every connection too."""
        self.stop_listening()
        for connection in self._connections:
            if connection is not None:
                connection.close()
