"""The streams of one replica that a client may ask for again, within bounds of time and memory.

A stream is kept from its first event on. While nobody reads it, it runs no sequence and holds no cache block: it has the
events that were written, and the tokens from which the engine goes on. Decides what is kept and for how long, and who may
read it: a stream is found by the owner of its API key and by its Idempotency-Key.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from deployments.http.choices import Choices
from deployments.http.disconnect import DisconnectScope
from deployments.http.resume.journal import Journal
from deployments.http.resume.numbered import NumberedSerializer
from deployments.observe.metrics import Metrics
from deployments.openai.answers.answer import AnswerSerializer
from deployments.openai.errors import StreamTakenOver
from deployments.openai.plan import Plan
from llama_core.shared_cache import heaviest_owner

BASE_BYTES = 16 * 2**10  # of a stream without its events: serializer, detokenizers, parsers
PLACE_BYTES = 8  # of a token in a list
TOKEN_BYTES = 32 + PLACE_BYTES  # a token's integer, and its place in a list


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """window_s: how long a stream is kept that nobody reads; 0: none is kept. max_bytes: of all kept streams together."""

    window_s: float = 120.0
    max_bytes: int = 64 * 2**20


class StreamKey(NamedTuple):
    """owner: of the API key; "" where the server has none. key: the Idempotency-Key."""

    owner: str
    path: str
    key: str


class Reader:
    """A connection that reads a stream. Another one that takes the stream over ends it."""

    def __init__(self) -> None:
        self._scope: DisconnectScope | None = None

    def runs_in(self, scope: DisconnectScope) -> None:
        self._scope = scope

    def end(self) -> None:
        if self._scope is not None:
            self._scope.cancel(
                StreamTakenOver("Another connection with the same Idempotency-Key reads this stream now.")
            )


class Continuation(NamedTuple):
    """What writes the further events of a stream."""

    choices: Choices
    serializer: NumberedSerializer


class Asked(NamedTuple):
    """The body that asked for a stream: its SHA-256 and its size."""

    digest: bytes
    num_bytes: int


class KeptStream:
    """One stream: its events so far, and what continues it."""

    def __init__(
        self,
        key: StreamKey,
        asked: Asked,
        plan: Plan,
        choices: Choices,
        serializer: AnswerSerializer,
        store: "KeptStreams",
    ) -> None:
        self.key, self.asked, self.plan = key, asked, plan
        num_prompt_tokens = sum(len(prompt) for prompt in plan.request.prompts)
        # A plan and its serializer hold parts of the body, such as schemas.
        self.num_bytes = BASE_BYTES + asked.num_bytes
        self.num_bytes += num_prompt_tokens * (TOKEN_BYTES + PLACE_BYTES * (plan.request.n + 1))
        self.journal = Journal(self._grow)
        # None once all events have been written and the stream has been put back.
        self.continuation: Continuation | None = Continuation(choices, NumberedSerializer(serializer, self.journal))
        self.reader: Reader | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._store = store

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes + TOKEN_BYTES
        self._store.grow(self, num_bytes + TOKEN_BYTES)

    def suspend(self) -> None:
        """Nobody reads the stream: its cache blocks are free when this returns."""
        self.reader = None
        if self.continuation is not None:
            choices, serializer = self.continuation
            others = choices.suspend()
            self.continuation = None if serializer.is_complete else Continuation(others, serializer)


class KeptStreams:
    """The kept streams, the least recently used first."""

    def __init__(self, limits: KeepLimits, metrics: Metrics | None = None) -> None:
        """metrics: where what is kept, resumed and dropped is counted."""
        self.limits = limits
        self._metrics = metrics
        if metrics is not None:
            metrics.watch_kept_streams(lambda: self.num_bytes)
        self.num_bytes = 0
        self._streams: OrderedDict[StreamKey, KeptStream] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, key: StreamKey) -> KeptStream | None:
        return self._streams.get(key)

    def keep(self, key: StreamKey, asked: Asked, plan: Plan, choices: Choices, serializer: AnswerSerializer) -> None:
        """Keep a new stream; there is none of this key."""
        assert key not in self._streams
        stream = self._streams[key] = KeptStream(key, asked, plan, choices, serializer, self)
        self.num_bytes += stream.num_bytes
        if self._metrics is not None:
            self._metrics.kept_streams.add()

    def resume(self, key: StreamKey, reader: Reader) -> KeptStream:
        """`take` a stream that an earlier request began."""
        if self._metrics is not None:
            self._metrics.resumed_streams.add()
        return self.take(key, reader)

    def take(self, key: StreamKey, reader: Reader) -> KeptStream:
        """The stream of this key. `reader` becomes its only reader."""
        stream = self._streams[key]
        if stream.reader is not None:
            stream.reader.end()
            stream.suspend()
        stream.reader = reader
        if stream.expiry is not None:
            stream.expiry.cancel()
        self._streams.move_to_end(stream.key)
        self._make_room()
        return stream

    def put_back(self, stream: KeptStream, reader: Reader, *, keeps: bool = True) -> None:
        """The reader has left; does nothing if another one has taken the stream over. Without `keeps`, forget the stream."""
        if stream.reader is not reader:
            return
        stream.suspend()
        if not keeps:
            self.drop(stream)
        if self._streams.get(stream.key) is stream:
            self._streams.move_to_end(stream.key)
            stream.expiry = asyncio.get_running_loop().call_later(self.limits.window_s, self._expire, stream)

    def drop(self, stream: KeptStream) -> None:
        """Forget a stream; its reader, if it has one, goes on without ids. Does nothing if it has been forgotten."""
        if self._streams.get(stream.key) is not stream:
            return
        del self._streams[stream.key]
        self.num_bytes -= stream.num_bytes
        stream.journal.drop()
        if stream.expiry is not None:
            stream.expiry.cancel()

    def _expire(self, stream: KeptStream) -> None:
        self._count_dropped("expired")
        self.drop(stream)

    def _count_dropped(self, cause: str) -> None:
        if self._metrics is not None:
            self._metrics.dropped_streams.add(cause=cause)

    def grow(self, stream: KeptStream, num_bytes: int) -> None:
        if self._streams.get(stream.key) is stream:
            self.num_bytes += num_bytes
            self._make_room()

    def _make_room(self) -> None:
        """Forget streams of the owner whose streams take most: those that nobody reads, the least recently used first; then the
        largest that is being read."""
        while self.num_bytes > self.limits.max_bytes:
            owner = heaviest_owner((stream.key.owner, stream.num_bytes) for stream in self._streams.values())
            own = [stream for stream in self._streams.values() if stream.key.owner == owner]
            unread = (stream for stream in own if stream.reader is None)
            self._count_dropped("memory")
            self.drop(next(unread, None) or max(own, key=lambda stream: stream.num_bytes))
