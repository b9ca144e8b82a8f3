"""The engine's end of its connections with fronts: takes their requests, and sends each front one frame a step.

Knows nothing of text: a front has the tokenizer's work, the stop strings and the client.
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Final, cast

import msgspec

from cluster.wire.messages import MAX_FRAME_BYTES, MAX_HELLO_BYTES, Deframer, WireError, frame
from cluster.wire.socket_dir import SocketDir
from cluster.wire.tls import make_group_key, tls_context
from cluster.wire.tls_server import TlsListener
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.service import LlamaService
from deployments.engine.timeline import Timeline
from deployments.fleet import messages
from deployments.fleet.affinity import shortened
from deployments.fleet.invitation import Invitation
from deployments.fleet.messages import BEAT_S, CLOSE_AFTER_S, MAX_UNREAD_BYTES, PROTOCOL, Detail, fault_of
from deployments.fleet.model_files import ModelFiles
from llama_core.errors import InvalidRequest, LlamaError, NotReady, QueueFull
from llama_core.log_lines import where
from llama_core.scheduling.prefix_cache import PrefixHash
from llama_core.scheduling.request import Sequence, TokenLogprob, check_prompt

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 10.0
_HAD = TokenLogprob(0.0, ())  # in the place of one that the front has


class FrontStream:
    """Implements `TokenSink` for one stream of a front."""

    def __init__(self, connection: "FrontConnection", number: int, seq: Sequence) -> None:
        self.sequence = seq
        self.timeline = Timeline(time.monotonic())
        self.number = number
        self._connection = connection
        self._num_logprobs = len(seq.logprobs)
        self._num_prompt_logprobs = len(seq.prompt_logprobs)
        self._has_begun = self._has_ended = False

    def admitted(self, now_s: float) -> None:
        self.timeline.admitted_s = now_s
        self._connection.admitted(self)

    def push(self, tokens: list[int]) -> bool:
        self._connection.add(self, tokens, self._detail())
        return False

    def fail(self, error: LlamaError) -> None:
        if self._connection.server.engine_loop.failure is not None:  # of the engine: its streams go on elsewhere
            self._connection.close("the engine has failed")
        elif not self._has_ended:  # else `push` has told the error
            self._has_ended = True
            self._connection.add(self, [], Detail(self.number, fault=fault_of(error)))

    def end(self, error: LlamaError) -> None:
        self._connection.server.engine_loop.cancel(self.sequence)
        self.fail(error)

    def _detail(self) -> Detail | None:
        """What is new beside the tokens; None for most steps."""
        seq, begins = self.sequence, not self._has_begun
        has_logprobs = len(seq.logprobs) > self._num_logprobs or len(seq.prompt_logprobs) > self._num_prompt_logprobs
        if not (begins or has_logprobs or seq.finished):
            return None
        self._has_begun, self._has_ended = True, seq.finished
        start, self._num_prompt_logprobs = self._num_prompt_logprobs, len(seq.prompt_logprobs)
        new, self._num_logprobs = seq.logprobs[self._num_logprobs :], len(seq.logprobs)
        return Detail(
            self.number,
            new,
            start,
            seq.prompt_logprobs[start:],
            seq.num_cached if begins else None,
            seq.finish_reason,
            seq.stop_token,
            None if seq.error is None else fault_of(seq.error),
        )


class FrontConnection(asyncio.Protocol):
    """One front. The first frame must be a `Hello` with the engine's secret, or the connection is closed."""

    def __init__(self, server: "FrontServer") -> None:
        self.server = server
        self._streams: dict[int, FrontStream] = {}
        self._deframer = Deframer(MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_greeted = False
        self._protocol = PROTOCOL
        self._last_number = 0  # of a stream that has been received
        self._heard_s = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None  # of the greeting
        self._numbers: list[int] = []
        self._in_frame: set[int] = set()  # of `_numbers`
        self._tokens: list[list[int]] = []
        self._details: list[Detail] = []
        self._admitted: list[tuple[int, float]] = []

    def admitted(self, stream: FrontStream) -> None:
        """Report an admission before its step is computed, which may kill this process."""
        if not self._admitted:
            asyncio.get_running_loop().call_soon(self._flush)
        self._admitted.append((stream.number, stream.timeline.queue_s or 0.0))

    def add(self, stream: FrontStream, tokens: list[int], detail: Detail | None) -> None:
        """Send these with the frame of this step."""
        if stream.number in self._in_frame:  # the event loop has taken two steps in turn
            self._flush()
        if not self._numbers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._numbers.append(stream.number)
        self._in_frame.add(stream.number)
        self._tokens.append(tokens)
        if detail is not None:
            self._details.append(detail)
            if detail.finish_reason is not None or detail.fault is not None:
                self._streams.pop(stream.number, None)

    def send(self, message: messages.FromEngine) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.close("it does not read")
        else:
            self._transport.write(frame(message))

    def close(self, reason: str, level: int = logging.WARNING) -> None:
        level = level if self._is_greeted else logging.DEBUG
        log.log(level, "closing the connection with a front: %s", reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods but not the base class
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.close, "no greeting")

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        try:
            for payload in self._deframer.feed(data):
                if self._is_greeted:
                    self._take(messages.decode_from_front(payload), payload)
                else:
                    self._greet(messages.decode_hello(payload))
        except WireError as error:
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.server.connections.pop(self, None)
        self._cancel(list(self._streams))

    def _greet(self, hello: messages.Hello) -> None:
        if not hmac.compare_digest(hello.secret, self.server.secret):
            raise WireError("the secret is not this engine's")
        if not messages.works_with(hello.protocol):
            raise WireError(f"its protocol is {hello.protocol}, this engine's {PROTOCOL}")
        assert self._deadline is not None
        self._deadline.cancel()
        self._is_greeted, self._protocol = True, hello.protocol
        self._deframer.max_frame_bytes = MAX_FRAME_BYTES
        self.server.connections[self] = None
        self.send(self.server.welcome(hello.has_files))
        self.beat(self.server.whole_beat())
        self.server.beat()  # the number of fronts has changed

    def beat(self, beat: messages.Beat) -> None:
        unheard_s = time.monotonic() - self._heard_s if self._protocol > 1 else 0.0
        queued = [number for number, stream in self._streams.items() if stream.sequence.slot is None]
        self.send(msgspec.structs.replace(beat, received=self._last_number, unheard_s=unheard_s, queued=queued))

    def close_if_silent(self) -> None:
        """A front that has lost power leaves streams behind, which nobody reads."""
        if self._protocol > 1 and time.monotonic() - self._heard_s > CLOSE_AFTER_S:
            self.close(f"it has said nothing for {CLOSE_AFTER_S:g} s; its {len(self._streams)} streams end")

    def _take(self, message: messages.FromFront, payload: bytes) -> None:
        if isinstance(message, messages.Alive):
            return
        if isinstance(message, messages.Cancel):
            self._cancel(message.numbers, is_stop=message.is_stop)
            return
        first = message.first if isinstance(message, messages.Submit) else message.number
        count = self._count(message)
        self._last_number = max(self._last_number, first + count - 1)
        try:
            if len(self._streams) + count > (most := self.server.max_streams):
                raise QueueFull(f"the engine takes at most {most} streams of one front")
            if not messages.knows_all_of(message, payload):
                raise NotReady("the request has a parameter that this engine's version does not know")
            if isinstance(message, messages.Submit):
                sequences = self.server.engine_loop.sequences_of(message.request, message.request_id)
                streams = [FrontStream(self, first + i, seq) for i, seq in enumerate(sequences)]
                self.send(messages.Accepted(first))
                for stream in streams:
                    self._streams[stream.number] = stream
                    self.server.engine_loop.enter(stream)
            else:
                self.server.engine_loop.check_adapter(message.adapter)
                stream = self._streams[first] = FrontStream(self, first, _continued(message, self.server.engine_loop))
                if message.is_readmitted:
                    self.server.engine_loop.make_room(message.owner, [len(message.prompt)])
                self.server.engine_loop.continue_(stream, message.num_failures, first=message.has_begun)
        except LlamaError as error:
            self._streams.pop(first, None)
            self.send(messages.Refused(first, fault_of(error)))

    def _count(self, message: messages.Submit | messages.Continue) -> int:
        """The streams of a message. Raises WireError for what no front sends."""
        if isinstance(message, messages.Continue):
            first, count = message.number, 1
        else:
            request, first = message.request, message.first
            if request.n < 1 or len(request.params) != len(request.prompts):
                raise WireError("a request without choices, or without parameters for each prompt")
            if (count := request.num_choices) > self.server.max_streams:
                raise WireError(f"{count} choices, of at most {self.server.max_streams}")
        if any(number in self._streams for number in range(first, first + count)):
            raise WireError("the number of a stream that lives")
        return count

    def _cancel(self, numbers: Iterable[int], *, is_stop: bool = False) -> None:
        for number in numbers:
            if (stream := self._streams.pop(number, None)) is not None:
                (self.server.engine_loop.stop if is_stop else self.server.engine_loop.cancel)(stream.sequence)

    def _flush(self) -> None:
        if not (self._numbers or self._admitted):
            return
        self._in_frame.clear()
        numbers, tokens, details, admitted = self._numbers, self._tokens, self._details, self._admitted
        self._numbers, self._tokens, self._details, self._admitted = [], [], [], []
        scheduler = self.server.engine_loop.scheduler
        step = messages.Step(
            self.server.elapsed_ms,
            numbers,
            tokens,
            details,
            scheduler.num_running,
            scheduler.num_waiting,
            admitted,
            self._last_number,
        )
        if self._transport is not None and not self._transport.is_closing():
            self.send(step)


def _continued(message: messages.Continue, loop: EngineLoop) -> Sequence:
    """Raises InvalidRequest."""
    params, prompt = message.params, message.prompt
    check_prompt([*prompt, *message.output], loop.vocab_size, loop.max_seq_len)
    params.check_tokens(loop.vocab_size)
    if len(message.output) > params.max_tokens:
        raise InvalidRequest("the stream has more tokens than max_tokens")
    max_length = min(loop.max_seq_len, len(prompt) + params.max_tokens)
    owner, priority, scope = message.owner, message.priority, message.cache_scope
    seq = Sequence(prompt, params, max_length, owner, priority, scope, message.request_id, adapter=message.adapter)
    seq.tokens += message.output
    if params.logprobs is not None:
        seq.logprobs = [_HAD] * len(message.output)
    if message.has_prompt_logprobs:
        seq.prompt_logprobs = [_HAD] * (len(prompt) - 1)
    return seq


class FrontServer:
    """Serves fronts from a service that is ready. `elapsed_ms`: of the latest step; the caller sets it."""

    def __init__(self, service: LlamaService, files: ModelFiles) -> None:
        self.engine = service.engine_id
        self.secret = secrets.token_bytes(32)
        self.elapsed_ms = 0.0
        self.connections: dict[FrontConnection, None] = {}  # an ordered set
        self._service = service
        self._files, self._files_digest = files, files.digest
        self._tokenizer_digest = files.tokenizer_digest
        self._servers: list[asyncio.Server | TlsListener] = []
        self._dir: SocketDir | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def max_streams(self) -> int:
        """Of one front."""
        return messages.max_streams(self._service.config.max_batch_size, self._service.args.max_queue)

    @property
    def engine_loop(self) -> EngineLoop:
        return self._service.loop

    async def open(self, node: str, host: str) -> Invitation:
        """Listen on a unix socket, and on a port of `host` with TLS. node: Ray's id of this node."""
        loop, key = asyncio.get_running_loop(), make_group_key()
        self._dir = SocketDir()
        path = self._dir.socket_path
        listener = TlsListener(lambda: FrontConnection(self), host, tls_context(key, "driver"))
        self._servers = [await loop.create_unix_server(lambda: FrontConnection(self), path), listener]
        self._beating = asyncio.create_task(self._beat_always())
        return Invitation(self.engine, self._service.model_id, node, path, host, listener.port, self.secret, key)

    def welcome(self, has_files: Iterable[str]) -> messages.Welcome:
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
        message = self.welcome([self._files_digest])
        for connection in list(self.connections):
            connection.send(message)

    def beat(self) -> None:
        """Tell every front the state of this engine, and how its prefix cache has changed."""
        changes = self.engine_loop.scheduler.pool.prefixes.take_changes()
        message = self.whole_beat() if changes is None else self._beat(changes)
        for connection in list(self.connections):
            connection.beat(message)

    def whole_beat(self) -> messages.Beat:
        """With all that the prefix cache holds."""
        hashes = self.engine_loop.scheduler.pool.prefixes.hashes
        return self._beat(dict.fromkeys(hashes, True), is_whole=True)

    def _beat(self, changes: Mapping[PrefixHash, bool], *, is_whole: bool = False) -> messages.Beat:
        cached = [shortened(prefix) for prefix, is_cached in changes.items() if is_cached]
        evicted = [shortened(prefix) for prefix, is_cached in changes.items() if not is_cached]
        service = self._service
        return messages.Beat(
            service.describe(),
            service.sampling_defaults,
            cached,
            evicted,
            is_whole,
            num_fronts=len(self.connections),
        )

    async def hand_over(self, has_successor: bool, timeout_s: float) -> None:
        """Fronts take their streams to other engines, or, where a successor is to come, hold them. Returns when none is left
        here, or after the timeout."""
        for connection in list(self.connections):
            connection.send(messages.Goodbye(has_successor))
        if not await self.engine_loop.drain(timeout_s):
            log.warning("streams have not ended within %.0f s: their fronts move or hold them", timeout_s)

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close("the engine ends", logging.INFO)
        if self._dir is not None:
            self._dir.remove()

    async def _beat_always(self) -> None:
        while True:
            due_s = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            try:
                self.beat()
                has_stood_still = time.monotonic() - due_s >= BEAT_S  # then it has read nothing meanwhile
                for connection in () if has_stood_still else list(self.connections):
                    connection.close_if_silent()
            except Exception as error:  # the next beat may succeed
                log.error("a beat has failed\n%s", where(error))
