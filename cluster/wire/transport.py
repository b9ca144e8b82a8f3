"""Connects a driver with its ranks: where the driver listens, and how a rank authenticates. Knows nothing of steps or Ray.

If all ranks are on the driver's node, the driver listens on a unix socket in a private directory, which it removes as soon as
the last rank has connected. Otherwise it listens on TCP (IPv4 or IPv6) with TLS, both sides pinned to the group's own key.
Either way the first frame must be a `Hello` with the group's secret, or the connection is closed.
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
from cluster.wire.tls import GroupKey, TlsListener, make_group_key, tls_context

logger = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address and the secret with which a rank connects, carried by a Ray call. Either `path`, or `host`, `port`, `key`."""

    epoch: int
    secret: bytes = field(repr=False)
    path: str | None = None
    host: str = ""
    port: int = 0
    key: GroupKey | None = None


def connect(invitation: Invitation, rank: int, timeout_s: float) -> FrameSocket:
    """For the rank: connect and send `Hello` within `timeout_s`. The connection has no timeout from then on. Raises OSError
    (ssl.SSLError is one).
    """
    if invitation.path is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        connection.connect(invitation.path)
    else:
        connection = socket.create_connection((invitation.host, invitation.port), timeout_s)
        # A step is a small write, which must not wait for the acknowledgement of the previous one.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        assert invitation.key is not None
        connection = tls_context(invitation.key, "rank").wrap_socket(connection)
    frames = FrameSocket(connection)
    frames.send(Hello(invitation.epoch, rank, invitation.secret))
    connection.settimeout(None)
    return frames


class RankConnection(asyncio.Protocol):
    """The driver's end of one rank's connection.

    `attend` sets the callbacks. `on_closed` gets the reason as a sentence. It is called once; immediately if the connection is
    closed already.
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
        """Close without a call of `on_closed`."""
        self._on_closed = None
        self._on_payload = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods but not the base class
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
            logger.warning("refused a connection to the rank group: %s", reason)
        elif self._on_closed is not None:
            self._on_closed(reason)


class RankListener:
    """Accepts one connection from each rank of a group, then stops listening.

    host: None for a unix socket, else the address to listen at, with TLS, on a port that the kernel picks.
    """

    def __init__(self, epoch: int, world_size: int, host: str | None) -> None:
        self._epoch = epoch
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._host = host
        self._server: asyncio.Server | TlsListener | None = None
        self._dir: SocketDir | None = None
        self.joined: list[RankConnection | None] = [None] * world_size  # by rank; None before a valid `Hello`
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unproven: set[RankConnection] = set()

    async def open(self) -> Invitation:
        """Start to listen. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._host is None:
            self._dir = SocketDir()
            path = self._dir.socket_path
            self._server = await loop.create_unix_server(lambda: RankConnection(self), path)
            return Invitation(self._epoch, self._secret, path=path)
        key = make_group_key()
        self._server = TlsListener(lambda: RankConnection(self), self._host, tls_context(key, "driver"))
        return Invitation(self._epoch, self._secret, host=self._host, port=self._server.port, key=key)

    def admit(self, connection: RankConnection, hello: Hello) -> int:
        """Check the connection's greeting; returns the rank that it belongs to. Raises WireError."""
        if not hmac.compare_digest(hello.secret, self._secret):
            raise WireError("the secret is not this group's")
        if hello.epoch != self._epoch:
            raise WireError(f"a Hello of epoch {hello.epoch} in epoch {self._epoch}")
        if not 0 <= hello.rank < len(self.joined) or self.joined[hello.rank] is not None:
            raise WireError(f"rank {hello.rank} is not expected")
        self.unproven.discard(connection)
        self.joined[hello.rank] = connection
        if None not in self.joined and not self._complete.done():
            self._complete.set_result(None)
        return hello.rank

    async def connections(self) -> list[RankConnection]:
        """Wait for all ranks; returns their connections in order. Then nothing listens any more and no socket file is left."""
        await self._complete
        self.stop_listening()
        return [connection for connection in self.joined if connection is not None]

    def stop_listening(self) -> None:
        """Close the listening socket and every connection without a valid `Hello`. Idempotent."""
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
        for connection in self.joined:
            if connection is not None:
                connection.close()
