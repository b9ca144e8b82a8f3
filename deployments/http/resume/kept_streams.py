"""The streams of one replica whose clients may come back, and texts of answers, within bounds of time and memory.

A stream that nobody reads runs no sequence and holds no cache block: its tokens are kept, from which the engine goes on. This
saves work alone: a stream that is not kept is computed again. Decides what is kept and for how long, and who may read it: a
stream is found by the owner of its API key and by its Idempotency-Key.
"""

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import SequenceStream
from deployments.http.choices import Choices
from deployments.http.disconnect import DisconnectScope
from deployments.http.resume.place import Fingerprint
from deployments.observe.metrics import Metrics
from deployments.openai.errors import StreamTakenOver
from deployments.openai.plan import Plan

BASE_BYTES = 8 * 2**10  # of a stream without its choices and its body
TEXT_BYTES = 700  # of a text without its bytes
PROMPT_TOKEN_BYTES = 40  # an integer, and its place in a list


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """window_s: how long a stream is kept that nobody reads; 0: none is kept. max_bytes: of all of these together."""

    window_s: float = 120.0
    max_bytes: int = 64 * 2**20


class StreamKey(NamedTuple):
    """owner: of the API key; "" where the server has none. key: the Idempotency-Key."""

    owner: str
    path: str
    key: str


@dataclass(eq=False)
class Reader:
    """A connection that reads a stream. scope: what it runs in, which ends when another one takes the stream over."""

    scope: DisconnectScope | None = None


def taken_over() -> StreamTakenOver:
    return StreamTakenOver("Another connection with the same Idempotency-Key reads this stream now.")


@dataclass(eq=False)
class KeptStream:
    """digest: of key and body. raw: the body, where the answer is stored. choices: while somebody reads it. num_bytes: counted
    while nobody does."""

    key: StreamKey
    digest: bytes
    engine: Engine
    plan: Plan
    fingerprint: Fingerprint
    raw: bytes = b""
    choices: Choices | None = None
    streams: Sequence[SequenceStream] = ()
    reader: Reader | None = None
    num_bytes: int = 0
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)

    def suspend(self) -> None:
        """Nobody reads the stream: its cache blocks are free when this returns."""
        self.reader = None
        if self.choices is not None:
            self.streams, self.choices = self.choices.suspend(), None

    def measured(self) -> int:
        """Memory of what is kept."""
        request, parsing = self.plan.request, self.plan.parsing
        own = BASE_BYTES + 2 * len(self.raw) + PROMPT_TOKEN_BYTES * sum(map(len, request.prompts))
        own += sys.getsizeof(request.params[0].grammar)  # which all have
        tools = () if parsing is None or parsing.use is None else parsing.use.tools
        own += sum(TEXT_BYTES + sys.getsizeof(tool.schema) + sys.getsizeof(tool.description) for tool in tools)
        return own + sum(stream.num_bytes for stream in self.streams)


@dataclass(eq=False)
class KeptText:
    key: StreamKey
    text: bytes
    num_bytes: int = 0
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)

    def measured(self) -> int:
        return TEXT_BYTES + len(self.text)


_Kept = KeptStream | KeptText


class KeptStreams:
    """The streams with an Idempotency-Key that are read or kept, and texts; of those that are kept, the least recently used
    first."""

    def __init__(self, limits: KeepLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        metrics.watch_kept_streams(lambda: self.num_bytes)
        self.num_bytes = 0
        self._streams: dict[StreamKey, _Kept] = {}
        self._unread: dict[str, OrderedDict[StreamKey, _Kept]] = {}  # by owner, the least recently used first
        self._held: dict[str, int] = {}  # their bytes

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, key: StreamKey) -> KeptStream | None:
        found = self._streams.get(key)
        return found if isinstance(found, KeptStream) else None

    def keep_text(self, key: StreamKey, text: bytes) -> None:
        if (former := self._streams.get(key)) is not None:
            self._uncount(former)
        self._keep(KeptText(key, text))

    def text(self, key: StreamKey) -> bytes | None:
        """From now on it is the most recently used one."""
        found = self._streams.get(key)
        if not isinstance(found, KeptText):
            return None
        self._uncount(found)
        self._keep(found)
        return found.text

    def begin(self, stream: KeptStream, reader: Reader) -> None:
        """`reader` reads a new stream; there is none of its key."""
        assert stream.key not in self._streams
        self._streams[stream.key] = stream
        stream.reader = reader

    def take(self, stream: KeptStream, reader: Reader) -> None:
        """`reader` becomes the only reader of a stream, and has its `streams` go on."""
        self.metrics.resumed_streams.add(source="kept")
        if stream.reader is not None:
            if stream.reader.scope is not None:
                stream.reader.scope.cancel(taken_over())
            stream.suspend()
        self._uncount(stream)
        stream.reader = reader

    def put_back(self, stream: KeptStream, reader: Reader, *, keeps: bool) -> None:
        """The reader has left; does nothing if another one has taken the stream over. Without `keeps`, forget the stream."""
        if stream.reader is not reader:
            return
        if not (keeps and self.limits.window_s):
            del self._streams[stream.key]
            return
        stream.suspend()
        self.metrics.kept_streams.add()
        self._keep(stream)

    def _keep(self, stream: _Kept) -> None:
        self._streams[stream.key] = stream
        stream.num_bytes = stream.measured()
        self.num_bytes += stream.num_bytes
        owner = stream.key.owner
        self._unread.setdefault(owner, OrderedDict())[stream.key] = stream
        self._held[owner] = self._held.get(owner, 0) + stream.num_bytes
        stream.expiry = asyncio.get_running_loop().call_later(self.limits.window_s, self._drop, stream, "expired")
        self._make_room()

    def _drop(self, stream: _Kept, cause: str) -> None:
        self.metrics.dropped_streams.add(cause=cause)
        self._uncount(stream)
        del self._streams[stream.key]

    def _uncount(self, stream: _Kept) -> None:
        owner = stream.key.owner
        if stream.key in self._unread.get(owner, ()):
            del self._unread[owner][stream.key]
            self._held[owner] -= stream.num_bytes
            if not self._unread[owner]:
                del self._unread[owner], self._held[owner]
        self.num_bytes -= stream.num_bytes
        stream.num_bytes = 0
        if stream.expiry is not None:
            stream.expiry.cancel()

    def _make_room(self) -> None:
        """Forget streams that nobody reads, of the owner whose streams take most, the least recently used first."""
        while self.num_bytes > self.limits.max_bytes:
            owner = max(self._held, key=self._held.__getitem__)
            self._drop(next(iter(self._unread[owner].values())), "memory")
