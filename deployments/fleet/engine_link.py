"""The front's end of its connection with one engine.

Decides nothing: `RemoteEngine` chooses engines, and moves streams from one to another.
"""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from cluster.wire.messages import MAX_FRAME_BYTES, Deframer, WireError, frame
from cluster.wire.tls import tls_context
from deployments.engine.interface import EngineState
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet import messages
from deployments.fleet.affinity import KnownPrefixes
from deployments.fleet.invitation import Invitation
from deployments.fleet.messages import PROTOCOL, error_of
from llama_core.errors import EngineError, LlamaError
from llama_core.scheduling.request import Request

log = logging.getLogger(__name__)

CONNECT_S: Final = 10.0
MAX_GAP_S: Final = 2.0  # an engine that says nothing for so long is suspected to hang


@dataclass(slots=True, eq=False)
class RoutedStream:
    """A stream of this front. link, number: of the engine that computes it; None while it is held.

    num_failures: engines that have ended since its last token, with it in their batches. is_accepted: the engine has queued it.
    is_admitted: to the engine's batch.
    """

    stream: SequenceStream
    link: "EngineLink | None" = None
    number: int = 0
    num_failures: int = 0
    is_accepted: bool = False
    is_admitted: bool = False


class LinkOwner(Protocol):
    """What a link tells. Implemented by `RemoteEngine`."""

    def on_step(self, link: "EngineLink", step: messages.Step) -> None: ...
    def on_refused(self, link: "EngineLink", live: RoutedStream, error: LlamaError) -> None:
        """The engine did not take a stream that it was to continue."""

    def on_state(self, link: "EngineLink") -> None:
        """The engine's state has changed."""

    def on_goodbye(self, link: "EngineLink", *, has_successor: bool) -> None: ...
    def on_lost(self, link: "EngineLink") -> None:
        """The connection has ended; `streams` has those that the engine computed."""


class EngineLink(asyncio.Protocol):
    """One connection. `streams`: by number, those that the engine computes; a number is never used again, so that what a
    stalled engine says of a stream that has moved on finds no stream."""

    def __init__(self, invitation: Invitation) -> None:
        self.invitation = invitation
        self.streams: dict[int, RoutedStream] = {}
        self.welcome: messages.Welcome | None = None
        self.state: EngineState | None = None
        self.running = self.waiting = 0
        self.prefixes = KnownPrefixes()
        self.is_leaving = self.is_suspected = self.is_lost = False
        self.heard_s = time.monotonic()
        self._owner: LinkOwner | None = None
        self._deframer = Deframer(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._numbers = itertools.count(1)
        self._accepting: dict[int, asyncio.Future[bool]] = {}
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
            self._send(messages.Hello(PROTOCOL, invitation.secret, tuple(has_files)[-2:]))
            return await self._welcomed

    def attach(self, owner: LinkOwner) -> None:
        """Tell `owner` from now on."""
        self._owner = owner
        if self.is_lost:
            owner.on_lost(self)

    @property
    def numerics(self) -> str:
        """Engines with the same text compute the same bits. It changes where fewer ranks serve."""
        assert self.welcome is not None and self.state is not None
        return f"{self.welcome.numerics}|{self.state.world_size}"

    @property
    def takes_requests(self) -> bool:
        return not (self.is_leaving or self.is_suspected or self.is_lost) and self.state is not None

    @property
    def is_ready(self) -> bool:
        return self.takes_requests and self.state is not None and self.state.phase == "ready"

    def cost(self, prompt_len: int, digests: Sequence[bytes]) -> float:
        """Of a prompt: sequences that run or wait there, for each slot, and steps for its unknown tokens. digests: of its
        prefixes."""
        assert self.state is not None
        load = (self.running + self.waiting + len(self._accepting)) / self.state.max_batch_size
        return load + (prompt_len - self.prefixes.num_known(digests)) / self.state.max_step_tokens

    async def submit(self, lives: Sequence[RoutedStream], request: Request, request_id: str) -> bool:
        """Queue all choices of a new request. False if the engine does not answer. Raises its refusal."""
        numbers = [self._take_on(live) for live in lives]
        accepting = self._accepting[numbers[0]] = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.Submit(numbers[0], request, request_id))
            is_accepted: bool = await accepting
            if not is_accepted:
                self.cancel(lives)
        except BaseException:
            self.cancel(lives)
            raise
        finally:
            self._accepting.pop(numbers[0], None)
        return is_accepted

    def resume(self, live: RoutedStream) -> None:
        """Continue a stream that another engine has begun."""
        seq = live.stream.sequence
        self._send(
            messages.Continue(
                self._take_on(live),
                seq.prompt,
                seq.params,
                seq.output,
                seq.owner,
                seq.priority,
                seq.cache_scope,
                seq.request_id,
                not seq.wants_prompt_logprobs,
                live.num_failures,
            )
        )
        live.is_accepted = True

    def cancel(self, lives: Sequence[RoutedStream], *, is_stop: bool = False) -> None:
        """The engine is to forget these streams, of those that it has not ended."""
        if numbers := [live.number for live in lives if self.streams.pop(live.number, None) is live]:
            self._send(messages.Cancel(numbers, is_stop))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_s, self.is_suspected = time.monotonic(), False
        try:
            for payload in self._deframer.feed(data):
                self._take(messages.decode_from_engine(payload))
        except WireError as error:
            log.error("engine %s sent an invalid message: %s", self.invitation.engine, error)
            self.close()

    def suspect(self) -> None:
        """The engine says nothing: requests that it has not taken go elsewhere."""
        self.is_suspected = True
        for accepting in self._accepting.values():
            if not accepting.done():
                accepting.set_result(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if not self._welcomed.done():
            self._welcomed.set_exception(WireError("the engine closed the connection"))
        self.suspect()
        if self._owner is not None:
            self._owner.on_lost(self)

    def _take(self, message: messages.FromEngine) -> None:
        if isinstance(message, messages.Welcome):
            self.welcome, self.state = message, message.state
            if not self._welcomed.done():
                self._welcomed.set_result(message)
        elif isinstance(message, messages.Accepted):
            if (accepting := self._accepting.get(message.first)) is not None and not accepting.done():
                number = message.first
                while (live := self.streams.get(number)) is not None and not live.is_accepted:
                    live.is_accepted = True
                    number += 1
                accepting.set_result(True)
        elif isinstance(message, messages.Refused):
            self._refused(message.first, error_of(message.fault))
        elif self._owner is None:
            return
        elif isinstance(message, messages.Step):
            self.running, self.waiting = message.running, message.waiting
            self._owner.on_step(self, message)
        elif isinstance(message, messages.Beat):
            self.state = message.state
            self.running, self.waiting = message.state.requests_running, message.state.requests_waiting
            self._owner.on_state(self)
        else:
            self.is_leaving = True
            self._owner.on_goodbye(self, has_successor=message.has_successor)

    def _refused(self, number: int, error: LlamaError) -> None:
        if (accepting := self._accepting.get(number)) is not None:
            while (live := self.streams.get(number)) is not None and not live.is_accepted:
                del self.streams[number]
                number += 1
            if not accepting.done():
                accepting.set_exception(error)
        elif (live := self.streams.pop(number, None)) is not None and self._owner is not None:
            self._owner.on_refused(self, live, error)

    def _take_on(self, live: RoutedStream) -> int:
        live.link, live.number, live.is_accepted, live.is_admitted = self, next(self._numbers), False, False
        self.streams[live.number] = live
        return live.number

    def _send(self, message: messages.FromFront | messages.Hello) -> None:
        if self._transport is None or self._transport.is_closing():
            return  # `connection_lost` follows
        try:
            self._transport.write(frame(message))
        except WireError as error:
            raise EngineError(f"the request is too large for one message: {error}") from None
