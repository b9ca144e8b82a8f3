"""The stream of one sequence from its engine to its one reader: text, tokens, the end or the error.

Knows nothing of steps or of HTTP. A slow reader gets more tokens at a time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from copy import copy
from typing import NamedTuple

from deployments.engine.timeline import Timeline
from llama_core.errors import LlamaError, RequestCancelled
from llama_core.scheduling.request import FinishReason, Request, Sequence, TokenLogprob
from llama_core.text.detokenizer import IncrementalDetokenizer, StopChecker
from llama_core.text.tokenizers.tokenizer import Tokenizer

# Memory, measured.
STREAM_BYTES = 2000  # without tokens
TOKEN_BYTES = 40  # an integer, and its place in a list
LOGPROB_BYTES = 88  # without its alternatives
ALTERNATIVE_BYTES = 120


class Delta(NamedTuple):
    """The tokens of a stream since the last delta, and their text.

    text: the generated tokens decoded on their own, as the reference does, so without a leading space of the very first
    token. It may be empty while half a character or a possible stop string is held back. logprobs: one for each of
    `tokens` if asked for. finish_reason: set in the last delta only.
    """

    text: str
    tokens: list[int]
    logprobs: Seq[TokenLogprob] = ()
    finish_reason: FinishReason | None = None


class SequenceStream:
    """One sequence being continued, for one reader; also an async iterator of `Delta`.

    The first token can be read at once. Tokens that arrive while the reader is busy reach it as one delta.
    """

    def __init__(
        self,
        seq: Sequence,
        tokenizer: Tokenizer,
        request: Request,
        on_cancel: Callable[[Sequence], None],
        *,
        is_timed: bool = False,
    ) -> None:
        """request: that the sequence is a choice of. is_timed: measure the time of turning tokens into text too."""
        self.sequence = seq
        # Of the engine that gave the latest token, and of the prompt's tokenizer, where engines are other processes.
        self.numerics = self.tokenizer_digest = ""
        self.tokenizer, self._request = tokenizer, request
        self._has_stops = bool(request.stop)
        self._on_cancel = on_cancel
        self._num_cached: int | None = None  # of a sequence that was suspended, when it ran first
        self._error: LlamaError | None = None
        self.begin_again(is_timed=is_timed)

    def begin_again(self, *, is_timed: bool) -> None:
        """The stream is read from its first token on, by another request, which has stages of its own."""
        seq, request = self.sequence, self._request
        now_s = time.monotonic()
        self.timeline = Timeline(now_s, ended_s=now_s if self.ended else None)
        self.is_timed = is_timed
        self._detokenizer = IncrementalDetokenizer(
            self.tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
        )
        self._stop = StopChecker(request.stop, includes_stop=seq.params.include_stop_str_in_output)
        self._wake: Callable[[], None] | None = None
        self._has_news = False  # the reader has been woken and has not called `take` yet
        self._texts: list[str] = []  # of each token that the reader does not have, and of the answer's end
        self._num_taken = seq.prompt_len  # tokens of the sequence that the reader has, with its prompt
        self._stopped = False
        self._done = False  # the reader has had the last delta
        if seq.output or self.ended:
            self.push(seq.output)

    @property
    def prompt_tokens(self) -> list[int]:
        return self.sequence.prompt

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        return self.sequence.prompt_logprobs

    @property
    def embedding(self) -> bytes:
        """float32 [dim], once the stream has ended."""
        assert self.sequence.embedding is not None, "the sequence has `params.pooling`, and has ended without an error"
        return self.sequence.embedding

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache, when the sequence ran first."""
        return (self.sequence.num_cached if self._num_cached is None else self._num_cached) or 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stop.matched

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the id of `stop_token_ids`, that ended the text; None where the model or a limit did."""
        return self.sequence.stop_token if self._stop.matched is None else self._stop.matched

    # For the model's owner, which gets the tokens of an engine.

    def push(self, tokens: list[int]) -> bool:
        """Add the tokens that the sequence has gained; none when it ended without one. Returns True if its text has reached a
        stop string. Later tokens of the same step are then removed."""
        began_s = time.perf_counter() if self.is_timed else 0.0
        seq = self.sequence
        num_known = seq.length - seq.prompt_len  # tokens of the answer
        for number, token in enumerate(tokens, num_known - len(tokens) + 1):
            self._extend(self._detokenizer.push_one(token), number)
            if self._stopped:
                seq.cut(num_known - number)
                break
        if seq.finish_reason is not None and not self._stopped:
            self._extend(self._detokenizer.flush(), num_known)
            if not self._stopped:
                self._texts.append(self._stop.flush())
        if self.is_timed:
            self.timeline.detokenize_s += time.perf_counter() - began_s
        self._tell(is_end=self.sequence.finish_reason is not None)
        return self._stopped

    def fail(self, error: LlamaError) -> None:
        """Give the reader `error` after the tokens that it has not read."""
        if self._error is None:
            self._error = error
        self._tell(is_end=True)

    # For the reader.

    @property
    def ended(self) -> bool:
        """Whether the sequence has ended; the reader may not have taken the last token or the error yet."""
        return self.sequence.finish_reason is not None or self._error is not None

    def cancel(self) -> None:
        """End the sequence at once; its cache blocks are free when this returns. Does nothing once it has ended."""
        self.end(RequestCancelled("the request was cancelled"))

    def end(self, error: LlamaError) -> None:
        """`cancel`, with another error for the reader."""
        self._on_cancel(self.sequence)
        self.fail(error)

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens and log-probabilities, roughly."""
        seq = self.sequence
        logprobs = seq.logprobs or seq.prompt_logprobs  # all have as many alternatives
        logprob_bytes = LOGPROB_BYTES + ALTERNATIVE_BYTES * (len(logprobs[0].top) if logprobs else 0)
        num_logprobs = len(seq.logprobs) + len(seq.prompt_logprobs)
        return STREAM_BYTES + TOKEN_BYTES * seq.length + logprob_bytes * num_logprobs

    def suspend(self) -> None:
        """`cancel`, but tokens are kept: the engine may take the sequence up again (`Engine.readmit`)."""
        self._on_cancel(self.sequence)
        seq = self.sequence
        self._texts.clear()
        if seq.finish_reason in (None, FinishReason.ABORT):
            if self._num_cached is None:
                self._num_cached = seq.num_cached
            self.sequence = seq.continued()
            self._error = None

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` when there is something to take: once until the next `take`, once more at the end, and at once if there
        is something already."""
        self._wake = wake
        if self._has_news:
            wake()

    def take(self, until: int | None = None) -> Delta | None:
        """The delta since the last call; None if there is none. Raises the LlamaError that ended the stream.

        until: the delta ends with this token of the answer, from 1 on, where the answer's end counts as one more; None while
        that has not been generated."""
        if not self._has_news or self._done:
            return None
        self._has_news = False
        seq, begin = self.sequence, self._num_taken
        end, finish_reason = seq.length, seq.finish_reason
        if until is not None and end - seq.prompt_len >= until:
            end, finish_reason = seq.prompt_len + until, None
            texts, self._texts = self._texts[: end - begin], self._texts[end - begin :]
            if end < seq.length or self.ended:
                self._tell()
        elif until is not None and not self.ended:
            return None
        else:
            if self._error is not None:
                if begin == end or until is not None:
                    self._done = True
                    raise copy(self._error)  # a raised error holds this frame, and so the stream; others may share it
                finish_reason = None
                self._tell()  # the error is for the next call
            self._done = finish_reason is not None
            texts, self._texts = self._texts, []
        self._num_taken = end
        text = texts[0] if len(texts) == 1 else "".join(texts)
        logprobs: list[TokenLogprob] = []
        if seq.params.logprobs is not None:
            logprobs = seq.logprobs[begin - seq.prompt_len : end - seq.prompt_len]
        return Delta(text, seq.tokens[begin:end], logprobs, finish_reason)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self._done:
                raise StopAsyncIteration
            arrival = asyncio.Event()
            self.listen(arrival.set)
            await arrival.wait()
        return delta

    def _tell(self, *, is_end: bool = False) -> None:
        if is_end or not self._has_news:
            self._has_news = True
            if self._wake is not None:
                self._wake()

    def _extend(self, text: str, number: int) -> None:
        """number: of the token that completes the text, from 1 on. A stop string in the text of `min_tokens` tokens is text."""
        if self._has_stops and text:
            text, self._stopped = self._stop.push(text, may_stop=number > self.sequence.params.min_tokens)
        self._texts.append(text)
