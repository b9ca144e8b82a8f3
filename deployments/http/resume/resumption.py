"""The headers by which a client asks for a stream that can be resumed: Idempotency-Key, and later Last-Event-ID."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

from deployments.http.choices import Choices
from deployments.http.resume.journal import parsed_id
from deployments.http.resume.kept_streams import Asked, Continuation, KeptStream, KeptStreams, Reader, StreamKey
from deployments.http.resume.numbered import NumberedSerializer
from deployments.openai.answers.answer import AnswerSerializer
from deployments.openai.errors import IdempotencyKeyReused, StreamNotFound
from deployments.openai.plan import Plan
from llama_core.errors import InvalidParameter

KEY_HEADER: Final = "Idempotency-Key"
EVENT_HEADER: Final = "Last-Event-ID"
_KEY_NAME: Final = KEY_HEADER.lower()
_EVENT_NAME: Final = EVENT_HEADER.lower()
_KEY = re.compile(r"[!-~]([ -~]{0,253}[!-~])?")


class Resumption:
    """One request that has an Idempotency-Key, and the stream that it reads.

    `find` the stream of an earlier request and `take` it, or `keep` a new one; then `events` are to be sent first.
    """

    def __init__(self, streams: KeptStreams, key: StreamKey, last_event: str) -> None:
        """last_event: the Last-Event-ID; "" if there is none."""
        self.reader = Reader()
        self._stream: KeptStream | None = None
        self._streams, self._key, self._last_event = streams, key, last_event
        self._asked = Asked(b"", 0)
        self._is_new = False

    def find(self, body: bytes) -> KeptStream | None:
        """The stream that an earlier request began, if there is one; without Last-Event-ID, it is sent from its beginning.

        Raises StreamNotFound where the client has an event of a stream that is not kept here, and IdempotencyKeyReused where
        the earlier request had another body.
        """
        self._asked = Asked(hashlib.sha256(body).digest(), len(body))
        return self.found()

    def found(self) -> KeptStream | None:
        """`find` with the same body again: another connection may have begun the stream meanwhile."""
        stream = self._streams.find(self._key)
        if stream is not None and stream.asked != self._asked:
            raise IdempotencyKeyReused(
                f"{KEY_HEADER}: an earlier request with this key had another body; send the same bytes, or another key",
                param=KEY_HEADER,
            )
        if self._last_event and (stream is None or not self._has_last_event(stream)):
            raise StreamNotFound(
                f"{EVENT_HEADER}: this replica keeps no stream with this event: it was begun on another replica, by another "
                f"API key or with another {KEY_HEADER}, it ended with an error, or it was dropped, which happens "
                f"{self._streams.limits.window_s:g} s after its last reader left or when memory is short; without "
                f"{EVENT_HEADER}, the request begins anew",
                param=EVENT_HEADER,
            )
        return stream

    def _has_last_event(self, stream: KeptStream) -> bool:
        event = parsed_id(self._last_event)
        return event is not None and event.stream == stream.journal.name and event.number <= stream.journal.num_events

    def keep(self, plan: Plan, choices: Choices, serializer: AnswerSerializer) -> NumberedSerializer:
        """Keep a new stream, which this request reads. Returns what writes its events."""
        self._is_new = True
        self._streams.keep(self._key, self._asked, plan, choices, serializer)
        continuation = self.take()
        assert continuation is not None, "a new stream is not complete"
        return continuation.serializer

    def take(self) -> Continuation | None:
        """Read the stream that was found; another reader of it is disconnected. Returns what continues it; None if it is
        complete."""
        take = self._streams.take if self._is_new else self._streams.resume
        self._stream = stream = take(self._key, self.reader)
        return stream.continuation

    def events(self) -> Iterator[bytes] | None:
        """The events after the client's last one that have been written, in slices; None where this request began the
        stream, or reads none."""
        if self._stream is None or self._is_new:
            return None
        event = parsed_id(self._last_event)
        number = 0 if event is None else event.number
        continuation = self._stream.continuation
        written_by = self._stream.journal if continuation is None else continuation.serializer
        return written_by.after(number)

    def close(self, *, failed: bool) -> None:
        """The request has ended. failed: with an error that the client has been told, or would get again."""
        if self._stream is not None:
            self._streams.put_back(self._stream, self.reader, keeps=not failed)


def resumption(headers: Mapping[str, str], streams: KeptStreams, path: str, owner: str) -> Resumption | None:
    """headers: by names in lower case. None for a request without Idempotency-Key. Raises InvalidParameter that names the
    header."""
    if _KEY_NAME not in headers and _EVENT_NAME not in headers:
        return None
    key = headers.get(_KEY_NAME, "").strip()
    last_event = headers.get(_EVENT_NAME, "").strip()
    if not key:
        if last_event:
            raise InvalidParameter(
                f"{EVENT_HEADER}: needs the {KEY_HEADER} of the request that began the stream", param=EVENT_HEADER
            )
        return None
    if not _KEY.fullmatch(key):
        raise InvalidParameter(f"{KEY_HEADER}: must be at most 255 printable ASCII characters", param=KEY_HEADER)
    if not streams.limits.window_s and not last_event:
        return None
    return Resumption(streams, StreamKey(owner, path, key), last_event)
