"""The interface of the answer's formats, each of which writes the deltas of a request as the bytes of its answer.

OpenAI's completions and chats are in `completions.py`; Anthropic's messages and OpenAI's responses have a folder each.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from deployments.engine.interface import Delta
from deployments.openai.answers.slices import Sliced
from llama_core.errors import LlamaError
from llama_core.scheduling.request import FinishReason, TokenLogprob
from llama_core.text.tokenizers.tokenizer import Tokenizer

PING = b": ping\n\n"


class CollectedChoice:
    """The deltas of one choice of a whole answer, joined."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def mean_logprob(self) -> float:
        """Of its tokens; the lowest number for an answer without tokens."""
        num_tokens = len(self._logprobs)
        return sum(entry.logprob for entry in self._logprobs) / num_tokens if num_tokens else -math.inf

    def joined(self) -> Delta:
        return Delta("".join(self._texts), self._tokens, self._logprobs, self._finish_reason)


class WholeSerializer(Protocol):
    """Writes one request's answer at once."""

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        """The answer as JSON, made in slices."""


class AnswerSerializer(WholeSerializer, Protocol):
    """Writes one request's answer: either events, delta by delta, or `whole`, once."""

    has_logprobs: bool  # deltas are written by `chunks`, not by `chunk`

    @property
    def ping(self) -> bytes:
        """What an idle stream sends; clients ignore it."""

    def opening(self) -> bytes:
        """The events that a stream begins with once its request is queued; b"" where it begins with the first token."""

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events of a choice's delta; b"" if it has nothing for the client yet."""

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The events of a delta with log-probabilities, each made of one slice."""

    def end_of_stream(self) -> bytes:
        """The events after the last choice's last delta."""

    def failure(self, error: LlamaError, request_id: str) -> bytes:
        """The last event of a stream that fails."""


class LeadingSpace:
    """The space before one choice's text, where that goes on with the prompt's text: decoding alone drops the space of the
    first token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, continues_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._space: str | None = None if continues_prompt else ""  # None: not known yet

    @property
    def is_written(self) -> bool:
        """Whether the texts of the next deltas stay as they are."""
        return self._space == ""

    def spaced(self, delta: Delta) -> str:
        """The text of the choice's next delta."""
        if delta.tokens and self._space is None:
            self._space = " " if self._is_dropped(delta.tokens[0]) else ""
        if not delta.text or not self._space:
            return delta.text
        self._space = ""
        return " " + delta.text

    def _is_dropped(self, token: int) -> bool:
        drops = self._tokenizer.leading_space != "keep" and self._tokenizer.leads_with_space(token)
        return drops and not all(self._tokenizer.is_control(token_id) for token_id in self._prompt)
