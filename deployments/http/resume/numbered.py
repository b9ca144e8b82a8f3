"""Writes a stream's events as another serializer does, and gives them the ids of a journal, which keeps them."""

from collections.abc import Iterator, Sequence

from deployments.engine.interface import Delta
from deployments.http.resume.journal import Journal
from deployments.openai.answers.answer import AnswerSerializer, CollectedChoice
from deployments.openai.answers.slices import Sliced
from llama_core.errors import LlamaError


class NumberedSerializer:
    """Implements `AnswerSerializer`. Pings and failures have no id: a client goes on after the last event that it can use."""

    def __init__(self, serializer: AnswerSerializer, journal: Journal) -> None:
        self.has_logprobs = serializer.has_logprobs
        self.is_complete = False  # the events that end the stream have been written
        self._serializer = serializer
        self._journal = journal
        self._chunks: Iterator[bytes] | None = None  # of a delta, as long as some of them have not been written

    @property
    def ping(self) -> bytes:
        return self._serializer.ping

    def opening(self) -> bytes:
        return self._journal.add(self._serializer.opening())

    def chunk(self, index: int, delta: Delta) -> bytes:
        return self._journal.add(self._serializer.chunk(index, delta))

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        self._chunks = self._serializer.chunks(index, delta)
        return self._rest()

    def after(self, number: int) -> Iterator[bytes]:
        """The events after this one that have been written, and the rest of the delta that was being written."""
        yield from self._journal.after(number)
        yield from self._rest()

    def _rest(self) -> Iterator[bytes]:
        # No `yield from`: when the reader of this generator is gone, another one goes on with the same chunks.
        while self._chunks is not None:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._chunks = None
            else:
                yield self._journal.add(chunk)

    def end_of_stream(self) -> bytes:
        if self.is_complete:
            return b""
        self.is_complete = True
        return self._journal.add(self._serializer.end_of_stream())

    def failure(self, error: LlamaError, request_id: str) -> bytes:
        return self._serializer.failure(error, request_id)

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        return self._serializer.whole(choices)
