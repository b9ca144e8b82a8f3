"""Writes a stream's events as another serializer does, with their ids, from the place on that a client has reached."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.http.choices import Choices
from deployments.http.resume.place import Fingerprint, Place, changed, has_tokens, misplaced, num_tokens, until
from deployments.openai.answers.answer import AnswerSerializer, CollectedChoice, Sliced
from llama_core.errors import LlamaError

END: Final = b"\n\n"  # of an event; JSON has no line feed of its own
TOKENS_IN_A_SLICE: Final = 64  # replayed without letting other tasks run: about 2 ms


class ResumableSerializer:
    """Implements `AnswerSerializer`. Pings and failures have no id: a client goes on after the last event that it can use.

    The id of an event is in its JSON too, because SDKs do not show the other one.
    """

    def __init__(
        self,
        serializer: AnswerSerializer,
        streams: Sequence[SequenceStream],
        fingerprint: Fingerprint,
        last: Place | None,
    ) -> None:
        """streams: of all choices. last: of the client; None for a stream from its beginning."""
        self._serializer = serializer
        self._last = last or Place(())
        self._state = ["0"] * len(streams)
        self._streams, self._fingerprint = streams, fingerprint

    @property
    def ping(self) -> bytes:
        return self._serializer.ping

    def opening(self) -> bytes:
        events, last = _split(self._serializer.opening()), self._last
        skip = last.num_events if last.is_opening or not last.state else len(events)
        return b"".join(_numbered(events, self._id, self._id, skip, self._stamp))

    async def rest(self, choices: Choices, ping_s: float) -> AsyncIterator[bytes]:
        """Has the choices and this serializer go on where the client is: drops what the client has, and gives the rest of the
        delta of which the client has a part; a ping every `ping_s`. Raises InvalidParameter where the answer does not get
        there, and AnswerChanged where it is another one."""
        self._check()
        for number, (index, place, skip) in enumerate(self._deltas(), 1):
            while (delta := await choices.take_to(index, until(place), ping_s)) is None:
                yield self.ping
            if self._after(index, delta) != place:
                is_other = self._last.fingerprint not in (None, self._fingerprint.of(self._numerics))
                raise changed() if is_other else misplaced()
            events = self._events(self._serializer.chunk(index, delta), index, delta, skip)
            self._check()
            for event in events:
                yield event
            if number % TOKENS_IN_A_SLICE == 0:
                await asyncio.sleep(0)
        choices.listen()

    def _check(self) -> None:
        """Where the client is: that it has had this answer. Raises AnswerChanged."""
        wanted = self._last.fingerprint if self._state == self._last.reached else None
        if wanted is not None and self._fingerprint.of(self._numerics) != wanted:
            raise changed()

    def _deltas(self) -> Iterator[tuple[int, str, int]]:
        """Choices, ends of deltas, and how many events of each the client has. One token each: no others have more events,
        so that the numbers of events only grow."""
        state, target, num_events, _ = self._last
        for index, reached in enumerate(state):
            for number in range(1, until(reached) + 1):
                yield index, str(number) if number < until(reached) else reached, sys.maxsize
        for index, place in enumerate(target or ()):
            if place != state[index]:
                yield index, place, num_events

    def chunk(self, index: int, delta: Delta) -> bytes | Iterator[bytes]:
        written = self._serializer.chunk(index, delta)
        events = self._events(written, index, delta)
        return b"".join(events) if isinstance(written, bytes) else events

    def _events(self, written: bytes | Iterator[bytes], index: int, delta: Delta, skip: int = 0) -> Iterator[bytes]:
        events: Iterable[bytes] = _split(written) if isinstance(written, bytes) else written
        before = self._id
        self._state[index] = self._after(index, delta)
        return _numbered(events, f"{before}-{self._id}", self._id, skip, self._stamp)

    def _after(self, index: int, delta: Delta) -> str:
        total = num_tokens(self._state[index]) + len(delta.tokens)
        return str(total) if delta.finish_reason is None else f"{total}e"

    def end_of_stream(self) -> bytes:
        events, last = _split(self._serializer.end_of_stream()), self._last
        skip = last.num_events if last.target is None and last.has_ended else 0
        return b"".join(_numbered(events, self._id, f"{self._id}:{len(events)}", skip, self._stamp))

    def failure(self, error: LlamaError, request_id: str) -> bytes:
        return self._serializer.failure(error, request_id)

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        return self._serializer.whole(choices)

    @property
    def _id(self) -> str:
        return ".".join(self._state)

    @property
    def _numerics(self) -> frozenset[str]:
        pairs = zip(self._streams, self._state, strict=True)
        return frozenset(stream.numerics for stream, reached in pairs if has_tokens(reached))

    @property
    def _stamp(self) -> str:
        return self._fingerprint.stamp(self._numerics)


def _split(events: bytes) -> list[bytes]:
    return events.removesuffix(END).split(END) if events else []


def _numbered(events: Iterable[bytes], before: str, after: str, skip: int, stamp: str) -> Iterator[bytes]:
    """The events after the first `skip`, with their ids: `after` for the last, and `before` with a number for the others. Each
    ends with `stamp`."""
    number, held = 0, b""
    for event in filter(None, events):
        if held:
            number += 1
            if number > skip:
                yield _with_id(held, f"{before}:{number}{stamp}")
        held = event.removesuffix(END)
    if held and number >= skip:
        yield _with_id(held, after + stamp)


def _with_id(event: bytes, event_id: str) -> bytes:
    name = event_id.encode()
    if event.endswith(b"}"):
        event = b'%s,"last_event_id":"%s"}' % (event[:-1], name)
    return b"id: %s\n%s\n\n" % (name, event)
