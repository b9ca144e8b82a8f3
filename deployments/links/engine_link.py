"""The front's connection with an engine of another process."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Final, cast

from cluster.wire.messages import HEADER_BYTES, MAX_FRAME_BYTES, Deframer, WireError, frame
from cluster.wire.tls import tls_context
from deployments.links import messages
from deployments.links.affinity import PrefixIndex
from deployments.links.invitation import Invitation
from deployments.links.link import MAX_GAP_S, Link
from deployments.links.messages import MAX_UNREAD_BYTES, PROTOCOL
from llama_core.errors import InvalidParameter

log = logging.getLogger(__name__)

CONNECT_S: Final = 10.0


class EngineLink(Link, asyncio.Protocol):
    """One connection."""

    def __init__(self, invitation: Invitation, prefixes: PrefixIndex) -> None:
        super().__init__(invitation.engine, invitation.host, prefixes)
        self.invitation = invitation
        self._deframer = Deframer(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._welcomed: asyncio.Future[messages.Welcome] = asyncio.get_running_loop().create_future()

    async def connect(self, node: str, has_files: Sequence[str]) -> messages.Welcome:
        """node: Ray's id of this node. has_files: digests of model files that this front has. Raises OSError (ssl.SSLError is
        one), WireError or TimeoutError."""
        loop, invitation = asyncio.get_running_loop(), self.invitation
        async with asyncio.timeout(CONNECT_S):
            if invitation.node == node:
                await loop.create_unix_connection(lambda: self, invitation.path)
            else:
                context = tls_context(invitation.key, "rank")
                await loop.create_connection(lambda: self, invitation.host, invitation.port, ssl=context)
            assert self._transport is not None
            if (connection := self._transport.get_extra_info("socket")).family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._transport.write(frame(messages.Hello(PROTOCOL, invitation.secret, tuple(has_files)[-2:])))
            return await self._welcomed

    @property
    def is_deaf(self) -> bool:  # type: ignore[override]
        """It does not read, or the network fails in one direction."""
        has_unread = self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES
        return has_unread or self._unheard_s > MAX_GAP_S

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.note_heard()
        try:
            for payload in self._deframer.feed(data):
                message = messages.decode_from_engine(payload)
                self.take(message)
                if isinstance(message, messages.Welcome) and not self._welcomed.done():
                    self._welcomed.set_result(message)
        except WireError as error:
            log.error("engine %s sent an invalid message: %s", self.engine_id, error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(WireError("the engine closed the connection"))
        self.lose()

    def send(self, message: messages.FromFront) -> None:
        if self._transport is None or self._transport.is_closing():
            return  # `connection_lost` follows
        try:
            sent = frame(message)
            if isinstance(message, messages.Submit):  # whose fields may be a caller's: whether the engine can read them
                messages.decode_from_front(sent[HEADER_BYTES:])
        except (WireError, UnicodeEncodeError, OverflowError, TypeError) as error:
            raise InvalidParameter(f"the request cannot be sent to an engine: {error}") from None
        self._transport.write(sent)
