"""The interface of the answer's formats, each of which writes the deltas of a request as the bytes of its answer.

OpenAI's completions and chats are in `completions.py`; Anthropic's messages and OpenAI's responses have a folder each.
"""

import asyncio
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, TypeVar

from deployments.engine.sequence_stream import Delta, SequenceStream
from llama_core.errors import LlamaError
from llama_core.scheduling.request import FinishReason, TokenLogprob
from llama_core.text.tokenizers.tokenizer import Tokenizer

PING = b": ping\n\n"
Result = TypeVar("Result")
# Long work on the event loop: yields between slices of about 5 ms, and returns the result. A thread would not help: the work
# holds the interpreter's lock.
Sliced = Generator[None, None, Result]


async def run_in_slices(work: Sliced[Result]) -> Result:
    """The result of `work`; other tasks run wherever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Result = done.value
            return result
        await asyncio.sleep(0)


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

    @property
    def ping(self) -> bytes:
        """What an idle stream sends; clients ignore it."""

    def opening(self) -> bytes:
        """The events that a stream begins with once its request is queued; b"" where it begins with the first token."""

    def chunk(self, index: int, delta: Delta) -> bytes | Iterator[bytes]:
        """The events of a choice's delta; b"" if it has nothing for the client yet. With log-probabilities an iterator, of
        events that are each made of one slice."""

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
            tokenizer = self._tokenizer
            drops = tokenizer.leading_space != "keep" and tokenizer.leads_with_space(delta.tokens[0])
            has_text = drops and not all(tokenizer.is_control(token_id) for token_id in self._prompt)
            self._space = " " if has_text else ""
        if not delta.text or not self._space:
            return delta.text
        self._space = ""
        return " " + delta.text


class AnswerEnding:
    """Leaves out of one choice's answer the text that a chat template writes after each answer, which the model then writes
    too. Holds it back until further text, or the answer's end, shows what it is.

    Llama 2 was trained on answers that end in a space before end-of-sequence. The Python API returns it, as Meta's reference
    does.
    """

    def __init__(self, ending: str) -> None:
        self._ending = ending
        self._is_held = False

    def without(self, delta: Delta, stream: SequenceStream) -> Delta:
        """The next delta without the ending, unless the answer ends in another way than by end-of-sequence."""
        ending, was_held = self._ending, self._is_held
        if delta.text:
            self._is_held = delta.text.endswith(ending)
        elif delta.finish_reason is None:
            return delta
        text = ending + delta.text if was_held and delta.text else delta.text
        if self._is_held:
            text = text.removesuffix(ending)
            ends_by_itself = delta.finish_reason is FinishReason.STOP and stream.matched_stop is None
            if delta.finish_reason is not None and not ends_by_itself:
                text += ending
        return delta if text == delta.text else delta._replace(text=text)
