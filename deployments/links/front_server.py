"""The engine's connections with fronts: sockets, greetings and beats."""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Final, cast

from cluster.wire.messages import MAX_FRAME_BYTES, MAX_HELLO_BYTES, Deframer, WireError, frame
from cluster.wire.socket_dir import SocketDir
from cluster.wire.tls import TlsListener, make_group_key, tls_context
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.service import LlamaService
from deployments.links import messages
from deployments.links.affinity import shortened
from deployments.links.front_session import FrontSession
from deployments.links.invitation import Invitation
from deployments.links.messages import BEAT_S, LOAD_S, MAX_UNREAD_BYTES, PROTOCOL
from deployments.links.model_files import ModelFiles
from llama_core.log_lines import where
from llama_core.scheduling.prefix_cache import PrefixHash

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 10.0


class FrontConnection(FrontSession, asyncio.Protocol):
    """A front of another process. The first frame must be a `Hello` with the engine's secret, or the connection is closed."""

    def __init__(self, server: "FrontServer") -> None:
        super().__init__(server)
        self.fronts = server
        self._deframer = Deframer(MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_greeted = False
        self._deadline: asyncio.TimerHandle | None = None  # of the greeting

    def send(self, message: messages.FromEngine) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.close("it does not read")
            return
        try:
            self._transport.write(frame(message))
        except (WireError, OverflowError) as error:  # a message for this front must not end the others
            self.close(f"a message for it cannot be written: {error}")

    def close(self, reason: str, level: int = logging.WARNING) -> None:
        level = level if self._is_greeted else logging.DEBUG
        log.log(level, "closing the connection with a front: %s", reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods but not the base class
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.close, "no greeting")

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        try:
            for payload in self._deframer.feed(data):
                if self._is_greeted:
                    message = messages.decode_from_front(payload)
                    self.take(message, is_known=messages.knows_all_of(message, payload))
                else:
                    self._greet(messages.decode_hello(payload))
        except WireError as error:
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.fronts.sessions.pop(self, None)
        self.cancel(list(self.streams))

    def _greet(self, hello: messages.Hello) -> None:
        if not hmac.compare_digest(hello.secret, self.fronts.secret):
            raise WireError("the secret is not this engine's")
        if not messages.works_with(hello.protocol):
            return self.fronts.name_protocol(self)
        assert self._deadline is not None
        self._deadline.cancel()
        self._is_greeted = True
        self._deframer.max_frame_bytes = MAX_FRAME_BYTES
        self.fronts.join(self, hello.has_files)


class FrontServer:
    """Serves fronts from a service that is ready. files: for fronts of other processes."""

    def __init__(self, service: LlamaService, files: ModelFiles | None = None) -> None:
        self.engine = service.engine_id
        self.secret = secrets.token_bytes(32)
        self.sessions: dict[FrontSession, None] = {}  # an ordered set
        self._service = service
        self._files = files
        self._files_digest, self._tokenizer_digest = (files.digest, files.tokenizer_digest) if files else ("", "")
        self.num_resumed = service.loop.num_resumed
        self._servers: list[asyncio.Server | TlsListener] = []
        self._dir: SocketDir | None = None
        self._beating = asyncio.create_task(self._beat_always())
        self._telling: asyncio.TimerHandle | None = None  # of the load

    @property
    def max_streams(self) -> int:
        """Of one front."""
        return messages.max_streams(self._service.config.max_batch_size, self._service.args.max_queue)

    @property
    def engine_loop(self) -> EngineLoop:
        return self._service.loop

    @property
    def held(self) -> tuple[int, int]:
        """Streams of this model that fronts hold, and their tokens."""
        told = [session.held for session in self.sessions]
        return sum(each.held for each in told), sum(each.held_tokens for each in told)

    async def open(self, node: str, host: str) -> Invitation:
        """Listen on a unix socket, and on a port of `host` with TLS. node: Ray's id of this node."""
        loop, key = asyncio.get_running_loop(), make_group_key()
        self._dir = SocketDir()
        path = self._dir.socket_path
        listener = TlsListener(lambda: FrontConnection(self), host, tls_context(key, "driver"))
        self._servers = [await loop.create_unix_server(lambda: FrontConnection(self), path), listener]
        return Invitation(self.engine, self._service.model_id, node, path, host, listener.port, self.secret, key)

    def join(self, session: FrontSession, has_files: Iterable[str] = ()) -> None:
        """A front that may send requests. has_files: digests of model files that it has."""
        self.sessions[session] = None
        session.send(self._welcome(has_files))
        session.beat(self._whole_beat() if self._files is not None else self._beat({}))
        self.beat()  # the number of fronts has changed

    def name_protocol(self, session: FrontSession) -> None:
        """A front of a version that does not work with this engine logs the protocol, and leaves."""
        session.send(self._welcome([self._files_digest]))

    def _welcome(self, has_files: Iterable[str]) -> messages.Welcome:
        digest = self._files_digest
        files = None if digest in has_files else self._files
        service = self._service
        return messages.Welcome(
            PROTOCOL,
            self.engine,
            f"{service.numerics}|{self._tokenizer_digest}",  # grammars depend on the tokenizer
            digest,
            files,
            service.describe(),
            service.sampling_defaults,
            service.adapters,
            list(service.adapter_folders),
            self._tokenizer_digest,
        )

    def tell_adapters(self) -> None:
        """Tell every front which adapters this engine has now."""
        message = self._welcome([self._files_digest])
        for session in list(self.sessions):
            session.send(message)

    def beat(self) -> None:
        self.num_resumed = self.engine_loop.num_resumed
        changes = self.engine_loop.scheduler.pool.prefixes.take_changes()
        if self._files is None:  # the front of this process chooses no engine by its cache
            changes = {}
        message = self._whole_beat() if changes is None else self._beat(changes)
        for session in list(self.sessions):
            session.beat(message)

    def load_changed(self) -> None:
        if self._telling is None and len(self.sessions) > 1:  # a front alone is told with its tokens
            self._telling = asyncio.get_running_loop().call_later(LOAD_S, self._tell_load)

    def _tell_load(self) -> None:
        self._telling = None
        for session in list(self.sessions):
            session.tell_load()

    def _whole_beat(self) -> messages.Beat:
        """With all that the prefix cache holds."""
        return self._beat(dict.fromkeys(self.engine_loop.scheduler.pool.prefixes.hashes, True), is_whole=True)

    def _beat(self, changes: Mapping[PrefixHash, bool], *, is_whole: bool = False) -> messages.Beat:
        cached = [shortened(prefix) for prefix, is_cached in changes.items() if is_cached]
        evicted = [shortened(prefix) for prefix, is_cached in changes.items() if not is_cached]
        service = self._service
        return messages.Beat(
            service.describe(),
            service.sampling_defaults,
            cached=cached,
            evicted=evicted,
            is_whole=is_whole,
            num_fronts=len(self.sessions),
            costs=service.loop.costs,
            places=list(service.loop.scheduler.adapter_places.held),
        )

    async def hand_over(self, has_successor: bool, timeout_s: float) -> None:
        """Fronts take their streams to other engines, or, where a successor is to come, hold them. Returns when none is left
        here, or after the timeout."""
        for session in list(self.sessions):
            session.send(messages.Goodbye(has_successor))
        if not await self.engine_loop.drain(timeout_s):
            log.warning("streams have not ended within %.0f s: their fronts move or hold them", timeout_s)

    def close(self) -> None:
        self._beating.cancel()
        if self._telling is not None:
            self._telling.cancel()
        for server in self._servers:
            server.close()
        for session in list(self.sessions):
            session.close("the engine ends", logging.INFO)
        if self._dir is not None:
            self._dir.remove()

    async def _beat_always(self) -> None:
        while True:
            due_s = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            try:
                self.beat()
                has_stood_still = time.monotonic() - due_s >= BEAT_S  # then it has read nothing meanwhile
                for session in () if has_stood_still else list(self.sessions):
                    session.close_if_silent()
            except Exception as error:  # the next beat may succeed
                log.error("a beat has failed\n%s", where(error))
