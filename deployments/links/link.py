"""The front's end of its link with one engine.

Decides nothing: `Placement` chooses engines, and moves streams from one to another. Knows nothing of how messages travel.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from deployments.engine.interface import EngineState, SamplingDefaults
from deployments.engine.sequence_stream import SequenceStream
from deployments.links import messages
from deployments.links.affinity import PrefixIndex, PromptPrefixes
from deployments.links.messages import BEAT_S, error_of, max_streams
from llama_core.errors import LlamaError
from llama_core.scheduling.request import Request
from llama_core.scheduling.step_costs import CostModel
from llama_core.text.model_text import ModelText

MAX_GAP_S: Final = 1.5  # an engine that says nothing for so long is suspected to hang


@dataclass(slots=True, eq=False)
class RoutedStream:
    """A stream of this front. link, number: of the engine that computes it; None while it is held.

    num_failures: engines that have ended since its last token, with it in their batches. is_accepted: the engine has queued it.
    is_admitted: to the engine's batch. lost_s: when it lost an engine, by time.monotonic; None once it runs again, or could run
    but for the engines' load. has_begun: it has been in a batch. is_readmitted: its client was away, and it has not been in a
    batch since. placed_s: when it began to wait there. num_moves: from one engine's queue to another's, since it was in a
    batch. refused_by: ids of engines that did not take it since, and whether for want of room.

    num_known: by engine, the known blocks of its prompt, as of the last choice. num_expected: tokens that its engine is to
    compute. due_s: when it is expected to have its first token. is_copy: another choice of the same prompt is before it.
    expected_s: when `prefixes` was told last that the engine will know the prompt.
    """

    stream: SequenceStream
    prefixes: PromptPrefixes
    link: "Link | None" = None
    number: int = 0
    num_failures: int = 0
    is_accepted: bool = False
    is_admitted: bool = False
    lost_s: float | None = None
    has_begun: bool = False
    is_readmitted: bool = False
    placed_s: float = 0.0
    num_moves: int = 0
    refused_by: dict[str, bool] = field(default_factory=dict)
    num_known: Mapping[Hashable, int] = field(default_factory=dict)
    is_copy: bool = False
    expected_s: float = 0.0
    num_expected: int = 0
    due_s: float = 0.0

    def num_new(self, link: "Link") -> int:
        """Tokens that the engine has to compute before it samples."""
        assert link.state is not None
        if self.is_copy:
            return 1
        return max(1, self.stream.sequence.length - link.state.block_size * self.num_known.get(link, 0))


@dataclass(frozen=True, slots=True)
class _Submission:
    """A request that the engine has not answered. result: False if it does not answer."""

    lives: Sequence[RoutedStream]
    result: asyncio.Future[bool]


class LinkOwner(Protocol):
    """What a link tells."""

    def on_step(self, link: "Link", step: messages.Step) -> None: ...
    def on_refused(self, link: "Link", live: RoutedStream, error: LlamaError) -> None:
        """The engine did not take a stream that it was to continue."""

    def on_load(self, link: "Link") -> None:
        """The engine has told its load."""

    def on_state(self, link: "Link") -> None:
        """The engine's state has changed."""

    def on_goodbye(self, link: "Link", *, has_successor: bool) -> None: ...
    def on_lost(self, link: "Link") -> None:
        """The link has ended; `streams` has those that the engine computed."""


class Link(ABC):
    """`streams`: by number, those that the engine computes; a number is never used again, so that what a stalled engine says of
    a stream that has moved on finds no stream."""

    is_deaf = False  # the engine, which may be heard, does not hear this front
    is_only = False  # the front never has another engine

    def __init__(self, engine_id: str, host: str, prefixes: PrefixIndex) -> None:
        """prefixes: of all engines of the front."""
        self.engine_id = engine_id
        self.name = f"{engine_id} on {host}"  # for log lines
        self.prefixes = prefixes
        self.text: ModelText | None = None  # the caller sets it
        self.tokenizer_digest = ""  # of what decides the tokens of a text; the caller sets it
        self.streams: dict[int, RoutedStream] = {}
        self.welcome: messages.Welcome | None = None
        self.state: EngineState | None = None
        self.defaults = SamplingDefaults()
        self.numerics = ""  # of the engine's service, with its number of ranks: it changes where fewer serve
        self.load = messages.Load()
        self.costs = CostModel()
        self.places: Sequence[str] = ()  # adapters that are in them
        self.num_fronts = 1  # that the engine serves
        self.num_refusals = 0
        self.was_ready = False  # when its owner was told last
        self.is_leaving = self.is_suspected = self.is_lost = False
        self.heard_s = time.monotonic()
        self._unheard_s = 0.0  # since the engine has heard this front
        self._back_s = 0.0  # when it was heard again after a silence
        self._owner: LinkOwner | None = None
        self._last_number = 0  # of a stream that has been sent
        self._unseen: deque[tuple[int, int]] = deque()  # streams that `load` does not include, and their tokens
        self._accepting: dict[int, _Submission] = {}

    @abstractmethod
    def send(self, message: messages.FromFront) -> None:
        """Raises InvalidParameter for a message that no engine can read."""

    @abstractmethod
    def close(self) -> None: ...

    def attach(self, owner: LinkOwner) -> None:
        """Tell `owner` from now on."""
        self._owner = owner
        self._unheard_s = 0.0  # this front has said nothing while it read the model's text
        self.tell_alive()
        if self.is_lost:
            owner.on_lost(self)

    def continues(self, numerics: str) -> bool:
        """Whether it samples the tokens that an engine with `numerics`, "" for any, would."""
        return numerics in ("", self.numerics)

    def has_adapter(self, adapter: str) -> bool:
        """adapter: a digest; "" for none."""
        assert self.welcome is not None
        return not adapter or adapter in self.welcome.adapter_digests

    @property
    def takes_requests(self) -> bool:
        """While its ranks recover, requests wait for them."""
        return not self._is_gone and self.state is not None and self.state.phase in ("ready", "recovering")

    @property
    def is_ready(self) -> bool:
        return not self._is_gone and self.state is not None and self.state.phase == "ready"

    @property
    def _is_gone(self) -> bool:
        return self.is_leaving or self.is_suspected or self.is_lost or self.is_deaf

    @property
    def is_full(self) -> bool:
        """It takes no further stream of this front."""
        assert self.state is not None
        return len(self.streams) >= max_streams(self.state.max_batch_size, self.state.max_queue)

    @property
    def running(self) -> int:
        return self.load.running

    @property
    def waiting(self) -> int:
        return self.load.waiting

    @property
    def has_waiting(self) -> bool:
        """Whether sequences wait there, of any front."""
        return self.load.waiting > 0 or bool(self._unseen)

    @property
    def num_sequences(self) -> int:
        """That run or wait there: those that it has told, and those that it has been sent since."""
        return self.load.running + self.load.waiting + len(self._unseen)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to be computed there, with those of streams that it has been sent since it told."""
        unseen = sum([num_expected for _, num_expected in self._unseen]) if self._unseen else 0
        return self.load.queued_tokens + unseen

    @property
    def num_free(self) -> int:
        """Slots."""
        assert self.state is not None
        return self.state.max_batch_size - self.num_sequences

    def expect(self, live: RoutedStream) -> None:
        """The engine will know the prompt of this stream, which it has not admitted."""
        if not (live.is_copy or self.is_only):
            assert self.state is not None
            live.expected_s = time.monotonic()
            self.prefixes.expect(self, live.prefixes.keys(self.state.block_size))

    async def submit(self, lives: Sequence[RoutedStream], request: Request) -> bool:
        """Queue all choices of a new request. False if the engine does not answer. Raises its refusal, or InvalidParameter for
        a field that it could not read."""
        if not self.takes_requests:
            return False
        for live in lives:
            self.take_on(live)
        first = lives[0].number
        submission = _Submission(lives, asyncio.get_running_loop().create_future())
        self._accepting[first] = submission
        try:
            self.send(messages.Submit(first, request, [live.num_expected for live in lives]))
            if not (is_accepted := await submission.result):
                self.cancel(lives)
        except BaseException:
            self.cancel(lives)
            raise
        finally:
            self._accepting.pop(first, None)
            del submission  # its error holds this frame
        return is_accepted

    def take_on(self, live: RoutedStream) -> None:
        """The stream counts as this engine's from now on. `resume` sends it."""
        self._last_number += 1
        live.link, live.number, live.placed_s = self, self._last_number, time.monotonic()
        live.is_accepted = live.is_admitted = False
        self.streams[live.number] = live
        live.num_expected = live.num_new(self)
        self._unseen.append((live.number, live.num_expected))
        self.expect(live)

    def resume(self, live: RoutedStream) -> None:
        """Continue a stream that another engine had. Raises InvalidParameter for one that is too long for a message."""
        seq = live.stream.sequence
        live.is_accepted = True
        self.send(
            messages.Continue(
                live.number,
                seq.prompt,
                seq.params,
                seq.output,
                seq.terms,
                has_prompt_logprobs=not seq.wants_prompt_logprobs,
                num_failures=live.num_failures,
                has_begun=live.has_begun and not live.is_readmitted,
                is_readmitted=live.is_readmitted,
                num_expected=live.num_expected,
            )
        )

    def tell_alive(self, held: int = 0, held_tokens: int = 0) -> None:
        """held: as of `Alive`."""
        if self.welcome is not None:
            self.send(messages.Alive(held, held_tokens))

    def cancel(self, lives: Sequence[RoutedStream], *, is_stop: bool = False) -> None:
        """The engine is to forget these streams, of those that it has not ended."""
        if numbers := [live.number for live in lives if self.streams.get(live.number) is live]:
            for number in numbers:
                del self.streams[number]
            self.send(messages.Cancel(numbers, is_stop))

    def note_heard(self) -> None:
        now_s = time.monotonic()
        if now_s - self.heard_s > MAX_GAP_S / 2:
            self._back_s = now_s
        self.heard_s, self.is_suspected = now_s, self.is_suspected and self.is_deaf

    def was_heard_since(self, silent_since_s: float) -> bool:
        """Whether it has been heard, beat by beat, while another engine was silent. Where all were, this front did not hear, or
        stood still; the next beats of those that come back may not have been read yet."""
        return self.heard_s > silent_since_s + BEAT_S and time.monotonic() - self._back_s > 2 * BEAT_S

    def suspect(self) -> None:
        """The engine says nothing: requests that it has not taken go elsewhere."""
        self.is_suspected, self.was_ready = True, False
        for submission in self._accepting.values():
            if not submission.result.done():
                submission.result.set_result(False)
                self.cancel(submission.lives)  # at once: its tokens may arrive before `submit` goes on

    def lose(self) -> None:
        """The link has ended."""
        self.is_lost = True
        self.prefixes.forget(self)
        self.suspect()
        if self._owner is not None:
            self._owner.on_lost(self)

    def take(self, message: messages.FromEngine) -> None:
        if isinstance(message, messages.Step):
            self._take_load(message.load)
            if self._owner is not None:
                self._owner.on_step(self, message)
                self._owner.on_load(self)
        elif isinstance(message, messages.Accepted):
            if (submission := self._accepting.get(message.number)) is not None and not submission.result.done():
                for live in submission.lives:
                    live.is_accepted = True
                submission.result.set_result(True)
        elif isinstance(message, messages.Refused):
            self._refused(message.number, error_of(message.fault))
        elif isinstance(message, messages.Beat):
            self._tell(message.state, message.defaults)
            self.num_fronts, self._unheard_s = message.num_fronts, message.unheard_s
            self.costs, self.places = message.costs, message.places
            self._take_load(message.load)
            self._note_queued(set(message.queued), message.load.received)
            self.prefixes.learn(self, message.cached, message.evicted, is_whole=message.is_whole)
            if self._owner is not None:
                self._owner.on_state(self)
        elif isinstance(message, messages.Welcome):
            self.welcome = message
            self._tell(message.state, message.defaults)
        else:
            self.is_leaving = True
            if self._owner is not None:
                self._owner.on_goodbye(self, has_successor=message.has_successor)

    def _tell(self, state: EngineState, defaults: SamplingDefaults) -> None:
        assert self.welcome is not None
        self.state, self.defaults = state, defaults
        self.numerics = f"{state.world_size}|{self.welcome.numerics}"

    def _take_load(self, load: messages.Load) -> None:
        self.load = load
        while self._unseen and self._unseen[0][0] <= load.received:
            self._unseen.popleft()

    def _refused(self, number: int, error: LlamaError) -> None:
        if (submission := self._accepting.get(number)) is not None:
            if not submission.result.done():
                self.num_refusals += 1
                submission.result.set_exception(error)
        elif (live := self.streams.pop(number, None)) is not None and self._owner is not None:
            self.num_refusals += 1
            self._owner.on_refused(self, live, error)

    def _note_queued(self, queued: set[int], received: int) -> None:
        """Streams may lose their slots, and get one again. received: the highest number that `queued` may have."""
        for number, live in self.streams.items():
            if live.has_begun and number <= received and live.is_admitted == (number in queued):
                live.is_admitted, live.placed_s = number not in queued, time.monotonic()
