"""The engine's end of its link with one front: takes the front's requests, and gives it what each step has computed.

Knows nothing of text, which is the front's, nor of how messages travel.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from cluster.wire.messages import WireError
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.timeline import Timeline
from deployments.links import messages
from deployments.links.messages import CLOSE_AFTER_S, Detail, fault_of
from llama_core.errors import InvalidParameter, InvalidRequest, LlamaError, NotReady, QueueFull
from llama_core.scheduling.request import Sequence, TokenLogprob, check_prompt

_HAD: Final = TokenLogprob(0.0, ())  # in the place of one that the front has


class FrontStream:
    """Implements `TokenSink` for one stream of a front."""

    def __init__(self, session: "FrontSession", number: int, seq: Sequence) -> None:
        self.sequence = seq
        self.timeline = Timeline(time.monotonic())
        self.number = number
        self._session = session
        self._num_logprobs = len(seq.logprobs)
        self._num_prompt_logprobs = len(seq.prompt_logprobs)
        self._has_begun = self._has_ended = False

    def admitted(self, now_s: float) -> None:
        self.timeline.admitted_s = now_s
        self._session.admitted(self)

    def fail(self, error: LlamaError) -> None:
        if self._has_ended:  # `push` has told the error
            return
        if self._session.outlives_engine and self._session.engine_loop.failure is not None:
            self._session.close("the engine has failed")
        else:
            self._has_ended = True
            self._session.add(self, [], Detail(self.number, fault=fault_of(error)))

    def push(self, tokens: list[int]) -> None:
        seq, begins = self.sequence, not self._has_begun
        has_logprobs = len(seq.logprobs) > self._num_logprobs or len(seq.prompt_logprobs) > self._num_prompt_logprobs
        is_finished = seq.finish_reason is not None
        if not (begins or has_logprobs or is_finished):  # as in most steps
            self._session.add(self, tokens, None)
            return
        self._has_begun, self._has_ended = True, is_finished
        start, self._num_prompt_logprobs = self._num_prompt_logprobs, len(seq.prompt_logprobs)
        new, self._num_logprobs = seq.logprobs[self._num_logprobs :], len(seq.logprobs)
        num_cached, fault = seq.num_cached if begins else None, None if seq.error is None else fault_of(seq.error)
        known = seq.prompt_logprobs[start:]
        ending = seq.finish_reason, seq.stop_token, fault, seq.embedding
        detail = Detail(self.number, new, start, known, num_cached, *ending)
        self._session.add(self, tokens, detail)


class EngineSide(Protocol):
    """What all sessions of an engine share."""

    @property
    def max_streams(self) -> int:
        """Of one front."""

    num_resumed: int  # of the engine loop, as fronts know

    @property
    def engine_loop(self) -> EngineLoop: ...
    def beat(self) -> None:
        """Tell every front the state of this engine, and how its prefix cache has changed."""

    def load_changed(self) -> None:
        """Tell every front the load within LOAD_S, if there are several."""


class FrontSession(ABC):
    """One front. `streams`: by number, those that the engine computes for it."""

    outlives_engine = True  # the front, whose streams go on elsewhere

    def __init__(self, server: EngineSide) -> None:
        self.server = server
        self.engine_loop = server.engine_loop
        self.heard_s = time.monotonic()
        self.held = messages.Alive()  # what the front has told last
        self.streams: dict[int, FrontStream] = {}
        self._last_number = 0  # of a stream that has been received
        self._told = messages.Load()
        self._numbers: list[int] = []
        self._in_frame: set[int] = set()  # of `_numbers`
        self._tokens: list[list[int]] = []
        self._details: list[Detail] = []
        self._admitted: list[tuple[int, float]] = []

    @abstractmethod
    def send(self, message: messages.FromEngine) -> None: ...
    @abstractmethod
    def close(self, reason: str, level: int = logging.WARNING) -> None: ...

    # For the streams.

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
                self.streams.pop(stream.number, None)

    def _flush(self) -> None:
        if not (self._numbers or self._admitted):
            return
        if self.server.num_resumed != self.engine_loop.num_resumed:  # other ranks may compute other bits
            self.server.beat()
        self._in_frame.clear()
        numbers, tokens, details, admitted = self._numbers, self._tokens, self._details, self._admitted
        self._numbers, self._tokens, self._details, self._admitted = [], [], [], []
        self._told = self._load()
        self.send(messages.Step(self._told, self.engine_loop.elapsed_ms, numbers, tokens, details, admitted))
        self.server.load_changed()

    def _load(self) -> messages.Load:
        scheduler = self.engine_loop.scheduler
        return messages.Load(
            self._last_number,
            scheduler.num_running,
            scheduler.num_waiting - scheduler.num_background_waiting,
            scheduler.num_queued_tokens,
            scheduler.pool.num_free,
        )

    # For the server.

    def beat(self, beat: messages.Beat) -> None:
        queued = [number for number, stream in self.streams.items() if stream.sequence.slot is None]
        unheard_s = time.monotonic() - self.heard_s
        self._told = self._load()
        self.send(msgspec.structs.replace(beat, load=self._told, unheard_s=unheard_s, queued=queued))

    def tell_load(self) -> None:
        """What other fronts have changed; free blocks alone change with every few tokens."""
        load = self._load()
        if msgspec.structs.replace(load, free_blocks=self._told.free_blocks) != self._told:
            self._told = load
            self.send(messages.Step(load))

    def close_if_silent(self) -> None:
        """A front that has lost power leaves streams behind, which nobody reads."""
        if time.monotonic() - self.heard_s > CLOSE_AFTER_S:
            self.close(f"it has said nothing for {CLOSE_AFTER_S:g} s; its {len(self.streams)} streams end")

    # For the front.

    def take(self, message: messages.FromFront, *, is_known: bool = True) -> None:
        """is_known: whether this version knows all of the message's fields. Raises WireError for what no front sends."""
        self.heard_s = time.monotonic()
        if isinstance(message, messages.Alive):
            held = min(max(0, message.held), self.server.max_streams)
            held_tokens = min(max(0, message.held_tokens), held * self.engine_loop.max_seq_len)
            self.held = messages.Alive(held, held_tokens)
            return
        if isinstance(message, messages.Cancel):
            self.cancel(message.numbers, is_stop=message.is_stop)
            return
        loop, first, count = self.engine_loop, message.number, self._count(message)
        self._last_number = max(self._last_number, first + count - 1)
        try:
            if count > self.server.max_streams:
                raise InvalidParameter.of("n", f"{count} choices are more than this server takes")
            if len(self.streams) + count > (most := self.server.max_streams):
                raise QueueFull(f"the engine takes at most {most} streams of one front")
            if not is_known:
                raise NotReady("the request has a parameter that this engine's version does not know")
            if isinstance(message, messages.Submit):
                sequences = loop.sequences_of(message.request)
                for seq, num_expected in zip(sequences, message.num_expected, strict=False):
                    seq.num_expected = min(max(0, num_expected), seq.length)
                streams = [FrontStream(self, first + i, seq) for i, seq in enumerate(sequences)]
                self.send(messages.Accepted(first))
                for stream in streams:
                    self.streams[stream.number] = stream
                    loop.enter(stream)
            else:
                loop.check_adapter(message.terms.adapter)
                stream = self.streams[first] = FrontStream(self, first, _continued(message, loop))
                if message.is_readmitted:
                    loop.make_room(message.terms, [len(message.prompt)])
                stream.sequence.num_expected = min(max(0, message.num_expected), stream.sequence.length)
                loop.continue_(stream, message.num_failures, first=message.has_begun)
        except LlamaError as error:
            self.streams.pop(first, None)
            self.send(messages.Refused(first, fault_of(error)))
        self.server.load_changed()

    def _count(self, message: messages.Submit | messages.Continue) -> int:
        """The streams of a message. Raises WireError for what no front sends."""
        first, count = message.number, 1
        if isinstance(message, messages.Submit):
            request, count = message.request, message.request.num_choices
            if request.n < 1 or len(request.params) != len(request.prompts):
                raise WireError("a request without choices, or without parameters for each prompt")
        if not 0 < first <= first + count < 2**63:
            raise WireError("a number that no stream has")
        if any(first <= number < first + count for number in self.streams):
            raise WireError("the number of a stream that lives")
        return count

    def cancel(self, numbers: Iterable[int], *, is_stop: bool = False) -> None:
        for number in numbers:
            if (stream := self.streams.pop(number, None)) is not None:
                (self.engine_loop.stop if is_stop else self.engine_loop.cancel)(stream.sequence)
                self.server.load_changed()


def _continued(message: messages.Continue, loop: EngineLoop) -> Sequence:
    """Raises InvalidRequest."""
    params, prompt = message.params, message.prompt
    check_prompt([*prompt, *message.output], loop.vocab_size, loop.max_seq_len)
    params.check_tokens(loop.vocab_size)
    if len(message.output) > params.max_tokens:
        raise InvalidRequest("the stream has more tokens than max_tokens")
    seq = Sequence(prompt, params, min(loop.max_seq_len, len(prompt) + params.max_tokens), message.terms)
    seq.tokens += message.output
    if params.logprobs is not None:
        seq.logprobs = [_HAD] * len(message.output)
    if message.has_prompt_logprobs:
        seq.prompt_logprobs = [_HAD] * (len(prompt) - 1)
    return seq
