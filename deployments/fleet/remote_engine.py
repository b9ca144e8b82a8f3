"""The engines of one model as one engine. The front owns every stream: its tokens, its parameters and its text.

An engine computes a stream's tokens. When it ends, another one with equal numerics continues from the tokens so far, and
samples the same next tokens, because a sample depends on (seed, position) alone. Without such an engine the front holds the
stream.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, cast

from deployments.engine.adapter_model import AdapterModels
from deployments.engine.callers import Callers
from deployments.engine.interface import (
    Engine,
    EngineState,
    EngineSummary,
    Readiness,
    StreamState,
    TokenStream,
)
from deployments.engine.live_streams import TokenSink
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_report import StepStats
from deployments.fleet import messages, routing
from deployments.fleet.affinity import PromptPrefixes
from deployments.fleet.engine_link import MAX_GAP_S, EngineLink, RoutedStream
from deployments.fleet.messages import BEAT_S, CLOSE_AFTER_S
from deployments.fleet.model_view import EngineText, ModelView
from llama_core.errors import (
    EngineError,
    InvalidParameter,
    LlamaError,
    NotReady,
    PoisonRequest,
    QueueFull,
    RequestAborted,
)
from llama_core.log_lines import log_subject, where
from llama_core.scheduling.fair_queue import TIMES_FREE_CAPACITY
from llama_core.scheduling.request import FinishReason, Request, sequences_of
from llama_core.scheduling.request import Sequence as Seq
from llama_core.text.model_text import ModelText

log = logging.getLogger(__name__)

TICK_S: Final = BEAT_S
# A stream waits so long at an engine before it moves to a free slot; twice as long after each move.
PATIENCE_S: Final = 0.25
MAX_FAILURES: Final = 4  # engines that end in turn with one stream in flight: the stream is the cause


class RemoteEngine:
    """Its `view` implements `Engine`. `add` engines; the rest follows from their connections."""

    def __init__(
        self,
        model_id: str,
        callers: Callers,
        hold_timeout_s: float,
        events: dict[str, int],
        on_step: Callable[[StepStats], None],
        on_end: Callable[[TokenSink], None],
        on_lost: Callable[[EngineLink], None] = lambda link: None,
        on_unserved: Callable[[], None] = lambda: None,
    ) -> None:
        """hold_timeout_s: how long a stream waits for an engine that can continue it. events: counts of FLEET_EVENTS. on_step,
        on_end: for metrics. on_lost: an engine's connection has ended. on_unserved: no engine takes requests."""
        self.model_id = model_id
        self.links: list[EngineLink] = []
        self._callers = callers
        self.hold_timeout_s = hold_timeout_s
        self._on_step, self._on_end, self._on_lost, self._on_unserved = on_step, on_end, on_lost, on_unserved
        self.has_application = False  # whether the latest engine has told its application
        self.is_removed = False  # with all applications that had the model
        self._last_text: EngineText | None = None
        self._welcomes: Sequence[messages.Welcome] = ()  # that `_adapters` is made of
        self._adapters: dict[str, str] = {}  # digests by name; kept without engines: requests for them wait
        self._state: EngineState | None = None  # of the engine that was heard last
        self._live: dict[Seq, RoutedStream] = {}
        self._held: dict[RoutedStream, None] = {}
        self._events = events
        self._num_fronts = 1  # of this model's engines
        self._lost_s = 0.0  # when the last engine was lost, by time.monotonic
        self._draining = self._stood_still = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._ticking = asyncio.create_task(self._tick_always())

    # Engines come and go.

    def add(self, link: EngineLink, text: ModelText) -> None:
        """Use an engine that has greeted this front. text: its model's."""
        assert link.welcome is not None and link.state is not None
        link.text, self._state = text, link.state
        self._last_text = EngineText(text, link.tokenizer_digest, link.defaults)
        self.is_removed, self.has_application = False, bool(link.invitation.application)
        self._num_fronts = link.num_fronts
        self.links.append(link)
        link.attach(self)
        self._place(list(self._held))
        for other in self.links:
            if other.is_leaving:
                self._move(other, has_failed=False, keeps=True)

    def on_state(self, link: EngineLink) -> None:
        assert link.state is not None
        self._state, self._num_fronts = link.state, link.num_fronts
        if link.is_ready and not link.was_ready:
            self._place(list(self._held))
        elif link.streams and not (link.is_ready or link.is_deaf):
            # Its ranks are replaced, or it ends: streams go on elsewhere, if they can.
            self._move(link, has_failed=not link.is_leaving, keeps=True)
        link.was_ready = link.is_ready

    def on_goodbye(self, link: EngineLink, *, has_successor: bool) -> None:
        """Streams stay there where no other engine can continue them and no successor is to come, or none with their
        adapter."""
        log.info("engine %s of %s ends: its %d streams move", link.name, self.model_id, len(link.streams))
        self._note_loss()
        self._move(link, has_failed=False, keeps=not has_successor)

    def on_lost(self, link: EngineLink) -> None:
        if link in self.links:
            self.links.remove(link)
            self._note_loss()
            level = logging.INFO if link.is_leaving else logging.WARNING
            log.log(level, "engine %s of %s is gone: its %d streams move", link.name, self.model_id, len(link.streams))
            self._move(link, has_failed=not link.is_leaving, keeps=False)
            self._on_lost(link)

    def on_refused(self, link: EngineLink, live: RoutedStream, error: LlamaError) -> None:
        live.link = None
        is_full = isinstance(error, QueueFull) and (not live.is_readmitted or live.num_moves > 0)
        if is_full or (isinstance(error, EngineError) and not isinstance(error, QueueFull | PoisonRequest)):
            live.refused_by[link.engine_id] = is_full
            self._place([live])
        else:
            self._fail(live, error)

    def _note_loss(self) -> None:
        if not any(link.takes_requests for link in self.links):
            self._lost_s = time.monotonic()
            self._on_unserved()

    def _move(self, link: EngineLink, *, has_failed: bool, keeps: bool, silent_since_s: float | None = None) -> None:
        """Continue the streams of `link`, which takes no requests any more, elsewhere. keeps: those that no other engine can
        continue now stay there; so do those of adapters that have been unloaded, which no engine to come has, until the
        connection ends. silent_since_s: of a silent link; only engines that have been heard meanwhile continue them."""
        assert link.welcome is not None
        adapters = set() if keeps else {"", *link.welcome.adapters.values()}  # whose streams may wait for an engine
        lives = [live for live in link.streams.values() if live.is_accepted]
        if not link.is_lost:
            adapter = {live: live.stream.sequence.adapter for live in lives}
            lives = [live for live in lives if adapter[live] in adapters or self._able(live, silent_since_s, but=link)]
        link.cancel(lives)
        self._events["moved"] += len(lives)
        for live in lives:
            live.link = None
            if has_failed and live.is_admitted:
                live.num_failures += 1
            if live.num_failures >= MAX_FAILURES:
                text = f"{live.num_failures} engines ended in turn while they computed this request, which has ended"
                self._fail(live, PoisonRequest(text))
        self._place([live for live in lives if not live.stream.ended], silent_since_s)

    def _place(self, lives: Iterable[RoutedStream], silent_since_s: float | None = None) -> None:
        """Continue streams that have no engine: those that have begun first, then the oldest. Where there is no engine they are
        held."""
        placed = []
        for live in sorted(lives, key=_turn):
            able = self._able(live, silent_since_s)
            usable = [link for link in able if not link.is_full and link.engine_id not in live.refused_by]
            if not usable:
                self._hold(live, has_engine=any(live.refused_by.get(link.engine_id, True) for link in able))
                continue
            _by_cost(usable, live)[0].take_on(live)
            self._held.pop(live, None)
            placed.append(live)
        # An engine puts each that has begun before all others, so the oldest of them comes last.
        num_begun = sum(live.has_begun for live in placed)
        for live in [*reversed(placed[:num_begun]), *placed[num_begun:]]:
            self._resume(live)

    def _resume(self, live: RoutedStream) -> None:
        assert live.link is not None
        try:
            live.link.resume(live)
        except InvalidParameter as error:
            self._fail(live, error)

    def _hold(self, live: RoutedStream, *, has_engine: bool) -> None:
        """has_engine: one could continue the stream, and has no room for it."""
        live.link = None
        if self.is_removed and not has_engine:
            self._fail(live, NotReady(f"the application of {self.model_id} has been removed"))
            return
        if not live.stream.sequence.output and self._has_other_tokenizer(live):
            # An engine of a release that failed, or was updated, has had it; with another text the prompt would be another.
            self._fail(live, NotReady("no engine has the tokenizer of this request's prompt any more: send it again"))
            return
        live.refused_by.clear()  # they are asked again at the next tick
        live.lost_s = None if has_engine else live.lost_s or time.monotonic()
        self._events["held"] += live not in self._held
        self._held[live] = None

    def _has_other_tokenizer(self, live: RoutedStream) -> bool:
        """Whether requests are taken, and no engine knows the tokens of this one's prompt."""
        digests = {link.tokenizer_digest for link in self.links if not link.is_leaving}
        takes_requests = any(link.takes_requests for link in self.links)
        return takes_requests and live.stream.tokenizer_digest not in digests

    def _able(
        self, live: RoutedStream, silent_since_s: float | None = None, but: EngineLink | None = None
    ) -> list[EngineLink]:
        """The engines that can compute the stream: with the tokenizer of its prompt, and the numerics of its first tokens."""
        stream, adapter = live.stream, live.stream.sequence.adapter
        return [
            link
            for link in self.links
            if link is not but
            and link.is_ready
            and (silent_since_s is None or link.was_heard_since(silent_since_s))
            and link.tokenizer_digest == stream.tokenizer_digest
            and link.continues(stream.numerics)
            and link.has_adapter(adapter)
        ]

    def _use_free_slots(self, now_s: float) -> None:
        """Streams that wait at an engine move to others with free slots: those that have begun first, then the oldest."""
        if not any(link.is_ready and link.num_free > 0 for link in self.links):
            return
        waiting = [
            live
            for link in self.links
            for live in link.streams.values()
            if live.is_accepted and not live.is_admitted and now_s - live.placed_s > PATIENCE_S * 2**live.num_moves
        ]
        for live in sorted(waiting, key=_turn):
            assert live.link is not None
            free = [link for link in self._able(live, but=live.link) if link.num_free > 0 and not link.is_full]
            if free:
                live.link.cancel([live])
                live.num_moves += 1
                self._events["moved"] += 1
                _by_cost(free, live)[0].take_on(live)
                self._resume(live)

    async def _tick_always(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            try:
                self._tick(due_s, time.monotonic())
            except Exception as error:  # the next tick may succeed
                log.error("the streams of %s could not be looked after\n%s", self.model_id, where(error))

    def _tick(self, due_s: float, now_s: float) -> None:
        for link in self.links:
            link.tell_alive()
        # After a pause of this process itself, each engine first tells once more what it hears.
        stood_still, self._stood_still = self._stood_still, now_s - due_s >= TICK_S
        if not (stood_still or self._stood_still):
            self._suspect_silent(now_s)
            self._place(list(self._held))
            self._use_free_slots(now_s)
        for live in [live for live in self._held if now_s - (live.lost_s or now_s) > self.hold_timeout_s]:
            self._events["hold_timeout"] += 1
            text = f"no engine could continue this stream within {self.hold_timeout_s:g} s (hold_timeout_s)"
            self._fail(live, NotReady(text))

    def _suspect_silent(self, now_s: float) -> None:
        """Streams move when all silent engines are known, and to engines that have been heard while these were silent: where
        there are none, it is this front that cannot hear."""
        silent = [link for link in self.links if now_s - link.heard_s > MAX_GAP_S or link.is_deaf]
        for link in silent:
            if not link.is_suspected:
                self._events["suspected"] += 1
                reason = "does not hear" if link.is_deaf else f"has said nothing for {now_s - link.heard_s:.1f} s"
                log.warning(
                    "engine %s of %s %s; it has %d streams", link.name, self.model_id, reason, len(link.streams)
                )
                link.suspect()
                self._note_loss()
        for link in silent:
            if now_s - link.heard_s > CLOSE_AFTER_S:
                link.close()
            elif link.streams:
                self._move(link, has_failed=True, keeps=True, silent_since_s=min(link.heard_s, now_s - MAX_GAP_S))

    # What an engine has computed.

    def on_step(self, link: EngineLink, step: messages.Step) -> None:
        now_s = time.monotonic()
        for number, queue_s in step.admitted:
            if (live := link.streams.get(number)) is not None:
                live.is_admitted, live.has_begun, live.is_readmitted = True, True, False
                live.lost_s, live.num_moves = None, 0
                live.refused_by.clear()
                if live.stream.timeline.admitted_s is None:
                    live.stream.timeline.admitted_s = live.stream.timeline.submitted_s + queue_s
        if not step.numbers:
            return
        details = {detail.number: detail for detail in step.details}
        intervals: dict[float, int] = {}
        num_sampled = num_prompt = num_hits = 0
        for number, tokens in zip(step.numbers, step.tokens, strict=True):
            live = link.streams.get(number)
            if live is None:  # it has moved on, or nobody reads it
                continue
            stream, seq = live.stream, live.stream.sequence
            if (detail := details.get(number)) is not None and detail.num_cached is not None and seq.num_cached is None:
                num_prompt, num_hits = num_prompt + seq.prompt_len, num_hits + detail.num_cached
            num_sampled += len(tokens)
            if tokens:
                stream.numerics, live.num_failures = link.numerics, 0
                if (seconds := stream.timeline.gained(now_s, step.elapsed_ms)) is not None:
                    seconds /= len(tokens)
                    intervals[seconds] = intervals.get(seconds, 0) + len(tokens)
            try:
                self._push(live, tokens, detail)
            except Exception as error:  # an error of one request must not fail the others
                log.error("a request failed while its tokens were decoded to text\n%s", where(error))
                self._fail(live, EngineError("the tokens of this request could not be decoded to text"))
        self._on_step(
            StepStats(
                num_rows=len(step.numbers),
                num_tokens=num_sampled,
                num_sampled=num_sampled,
                elapsed_ms=step.elapsed_ms,
                is_decode=not num_prompt and num_sampled > 0,
                num_prompt_tokens=num_prompt,
                num_prompt_hits=num_hits,
                token_intervals=tuple(intervals.items()),
            )
        )

    def _push(self, live: RoutedStream, tokens: list[int], detail: messages.Detail | None) -> None:
        stream, seq = live.stream, live.stream.sequence
        seq.tokens += tokens
        if detail is not None:
            seq.logprobs += detail.logprobs
            # Another engine may have reported some of these positions already.
            seq.prompt_logprobs += detail.prompt_logprobs[max(0, len(seq.prompt_logprobs) - detail.prompt_start) :]
            if seq.num_cached is None:
                seq.num_cached = detail.num_cached
            seq.finish_reason, seq.stop_token = detail.finish_reason, detail.stop_token
            if detail.fault is not None:
                seq.error, seq.finish_reason = messages.error_of(detail.fault), FinishReason.ERROR
        if stream.push(tokens):
            if live.link is not None:
                live.link.cancel([live], is_stop=True)
            seq.finish_reason, seq.error = FinishReason.STOP, None
        if seq.error is not None:
            stream.fail(seq.error)
        if seq.finished:
            self._ended(live)

    def _fail(self, live: RoutedStream, error: LlamaError) -> None:
        seq = live.stream.sequence
        if not seq.finished:
            seq.finish_reason = FinishReason.ERROR
        live.stream.fail(error)
        if live.link is not None:
            live.link.cancel([live])
        self._ended(live)

    def _ended(self, live: RoutedStream) -> None:
        if live.link is not None:
            live.link.streams.pop(live.number, None)
        if self._forget(live):
            live.stream.timeline.ended_s = time.monotonic()
            self._on_end(live.stream)

    def _forget(self, live: RoutedStream) -> bool:
        """Whether the stream was known."""
        self._held.pop(live, None)
        was_known = self._live.pop(live.stream.sequence, None) is not None
        if not self._live:
            self._idle.set()
        return was_known

    def _cancel(self, seq: Seq) -> None:
        """Nobody reads the stream of this sequence any more."""
        if (live := self._live.get(seq)) is not None:
            seq.finish_reason = seq.finish_reason or FinishReason.ABORT
            if live.link is not None:
                live.link.cancel([live])
            self._ended(live)

    # For the HTTP layer and the handle.

    @property
    def models(self) -> Mapping[str, Engine]:
        # One that is silent, or ends, may not know that an adapter has been unloaded.
        usable = [link for link in self.links if link.takes_requests] or self.links
        welcomes = [link.welcome for link in usable if link.welcome is not None]
        if welcomes and welcomes != self._welcomes:
            self._welcomes = welcomes
            self._adapters = {name: digest for welcome in welcomes for name, digest in welcome.adapters.items()}
        return AdapterModels(cast(Engine, self.view), self._adapters)

    @property
    def view(self) -> ModelView:
        return ModelView(self, self._text)

    @property
    def _text(self) -> EngineText:
        """Of the engine with the most room; of several, the text that most engines have."""
        if usable := [link for link in self.links if link.takes_requests] or self.links:
            texts = Counter(link.tokenizer_digest for link in usable)
            link = max(usable, key=lambda link: (link.num_free, texts[link.tokenizer_digest]))
            assert link.text is not None
            self._last_text = EngineText(link.text, link.tokenizer_digest, link.defaults)
        if self._last_text is None:
            raise self.readiness().not_ready()
        return self._last_text

    @property
    def _latest(self) -> EngineState:
        """Of the engine that was heard last. Raises NotReady before the first."""
        if self._state is None:
            raise self.readiness().not_ready()
        return self._state

    @property
    def max_seq_len(self) -> int:
        return self._latest.max_seq_len

    @property
    def max_request_tokens(self) -> int:
        state = self._latest
        return state.max_batch_size * state.max_seq_len + max(state.max_queue_tokens, state.max_seq_len)

    def remove(self) -> None:
        """End the streams that no engine computes, and from now on those that lose theirs."""
        self.is_removed = True
        self._place(list(self._held))

    @property
    def served_numerics(self) -> Set[str]:
        return {link.numerics for link in self.links if link.takes_requests}

    @property
    def is_served(self) -> bool:
        """Whether it has an engine, or waits for one."""
        is_waited_for = not self.is_removed and time.monotonic() - self._lost_s < self.hold_timeout_s
        return bool(self.links or self._live) or is_waited_for

    def readiness(self) -> Readiness:
        if self._draining:
            return Readiness(False, "draining", "shutting down", retry_after_s=5.0)
        if any(link.is_ready for link in self.links):
            return Readiness(True, "ready")
        if any(link.takes_requests for link in self.links):
            return Readiness(False, "recovering", "the engines' ranks are being replaced")
        if self.links or (self._state is not None and time.monotonic() - self._lost_s < self.hold_timeout_s):
            return Readiness(False, "recovering", f"no engine of {self.model_id} is connected; requests wait for one")
        return Readiness(False, "loading", f"no engine of {self.model_id} is connected")

    def check_capacity(self, owner: str = "") -> None:
        readiness = self.readiness()
        if not readiness.takes_requests:
            raise readiness.not_ready()
        state, usable = self._latest, [link for link in self.links if link.takes_requests]
        if usable:
            num_waiting = min(link.waiting for link in usable)
        else:  # of those that no engine has had, this front's share of what its engines took
            held = [live.stream.sequence for live in self._held if not live.has_begun]
            num_waiting, num_tokens = len(held), sum(seq.prompt_len for seq in held)
            own = sum(seq.owner == owner for seq in held)
            num_free = max(1, state.max_queue // self._num_fronts) - num_waiting
            is_share = own and own >= TIMES_FREE_CAPACITY * num_free
            if num_free <= 0 or num_tokens > state.max_queue_tokens / self._num_fronts or (owner and is_share):
                raise QueueFull("too many requests wait for an engine", retry_after_s=2.0)
        if num_waiting > state.max_queue:
            raise QueueFull(f"{num_waiting} sequences wait already, the limit is {state.max_queue}", retry_after_s=2.0)

    def cache_scope(self, owner: str) -> str:
        return self._callers.cache_scope(owner)

    def next_seed(self) -> int:
        return self._callers.next_seed()

    async def submit(
        self, request: Request, *, is_timed: bool = False, numerics: str = "", text: EngineText | None = None
    ) -> Sequence[SequenceStream]:
        """text: that the request was planned with."""
        self.check_capacity(request.owner)
        text, state = text or self._text, self._latest
        if request.num_choices > (most := state.max_batch_size + state.max_queue):
            raise InvalidParameter(
                f"n: at most {most} choices can be taken at once (max_batch_size + max_queue)", param="n"
            )
        request = replace(request, cache_scope=self.cache_scope(request.owner))
        subject = log_subject.get()
        request_id = "" if subject is None else subject.request_id
        tokenizer = text.text.tokenizer
        sequences = sequences_of(request, tokenizer.n_words, self.max_seq_len, request_id)
        request = replace(request, prompts=[seq.prompt for seq in sequences[:: request.n]])  # of plain ints
        prefixes = [PromptPrefixes(request.cache_scope, request.adapter, prompt) for prompt in request.prompts]
        lives = [
            RoutedStream(
                SequenceStream(seq, tokenizer, request, self._cancel, is_timed=is_timed), prefixes[i // request.n]
            )
            for i, seq in enumerate(sequences)
        ]
        for live in lives:
            live.stream.tokenizer_digest = text.tokenizer_digest
            self._live[live.stream.sequence] = live
            live.stream.numerics = numerics
        self._idle.clear()
        try:
            if not await self._submitted(lives, request, request_id):
                self._place(live for live in lives if live.stream.sequence in self._live)
        except BaseException:
            for live in lives:
                if live.link is not None:  # another engine may have got it while this was being cancelled
                    live.link.cancel([live])
                self._forget(live)
            raise
        return [live.stream for live in lives]

    async def _submitted(self, lives: Sequence[RoutedStream], request: Request, request_id: str) -> bool:
        """Whether an engine has taken the request. Raises the refusal of the last one whose queue is full."""
        refusal: QueueFull | None = None
        digest = lives[0].stream.tokenizer_digest
        usable = [link for link in self.links if link.takes_requests and link.tokenizer_digest == digest]
        usable = [link for link in usable if link.has_adapter(request.adapter)]
        usable = [link for link in usable if link.continues(lives[0].stream.numerics)]
        for link in _by_cost(usable, lives[0]):
            if len(usable) > 1:
                link.expect(lives[0].prefixes)
            try:
                if await link.submit(lives, request, request_id):
                    return True
            except QueueFull as error:
                refusal = error
            except EngineError as error:
                log.warning("engine %s of %s refuses a request: %s", link.name, self.model_id, error.message)
        if refusal is not None:
            raise refusal
        return False

    async def readmit(self, streams: Sequence[TokenStream], *, is_timed: bool = False) -> None:
        self.check_capacity()
        subject = log_subject.get()
        lives = []
        for stream in streams:
            assert isinstance(stream, SequenceStream), "the streams are this engine's"
            stream.begin_again(is_timed=is_timed)
            if not stream.ended:
                seq = stream.sequence
                seq.request_id = "" if subject is None else subject.request_id
                prefixes = PromptPrefixes(seq.cache_scope, seq.adapter, seq.prompt)
                self._live[seq] = live = RoutedStream(stream, prefixes, is_readmitted=True)
                lives.append(live)
        if lives:
            self._idle.clear()
            self._place(lives)

    def abort(self, request_id: str) -> bool:
        """End the request with this id; its reader gets RequestAborted. False if it has no stream here."""
        found = [live.stream for seq, live in self._live.items() if request_id and seq.request_id == request_id]
        for stream in found:
            stream.end(RequestAborted("This request was aborted by its id."))
        return bool(found)

    async def drain(self, timeout_s: float) -> None:
        """Take no new request, and wait for the live ones to end."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for live in list(self._live.values()):
                live.stream.end(NotReady("the server has shut down"))

    async def stop(self) -> None:
        self._ticking.cancel()
        links, self.links = self.links, []  # so that none is met again
        for link in links:
            link.close()

    def describe(self) -> EngineState:
        """Of the engine that was heard last, with the load of all of them."""
        states = [link.state for link in self.links if link.state is not None]
        return replace(
            self._latest,
            phase=self.readiness().phase,
            requests_running=sum(link.running for link in self.links),
            requests_waiting=sum(link.waiting for link in self.links) + len(self._held),
            blocks_total=sum(state.blocks_total for state in states),
            blocks_used=sum(state.blocks_used for state in states),
            preemptions=sum(state.preemptions for state in states),
            fleet_events=dict(self._events),
            streams=tuple(map(_stream_state, self._live.values())),
            engines=tuple(map(_summary, self.links)),
        )


def _by_cost(links: Sequence[EngineLink], live: RoutedStream) -> Sequence[EngineLink]:
    """For the stream's prompt, the best one first."""
    if len(links) < 2:
        return links
    prompt_len, keys = len(live.prefixes.prompt), live.prefixes.keys
    sizes = {link.state.block_size for link in links if link.state is not None}
    known = {engine: n for size in sizes for engine, n in links[0].prefixes.num_known(keys(size)).items()}
    costs = {link: link.cost(prompt_len, known.get(link, 0)) for link in links}
    return routing.by_cost(costs, live.prefixes.name(min(sizes)))


def _turn(live: RoutedStream) -> tuple[bool, int, float]:
    return not live.has_begun, live.stream.sequence.priority, live.stream.timeline.submitted_s


def _summary(link: EngineLink) -> EngineSummary:
    assert link.state is not None
    phase = "draining" if link.is_leaving else "silent" if link.is_suspected else link.state.phase
    return replace(
        link.state.engines[0],
        phase=phase,
        requests_running=link.running,
        requests_waiting=link.waiting,
        streams=len(link.streams),
        refusals=link.num_refusals,
        silent_s=round(time.monotonic() - link.heard_s, 3),
    )


def _stream_state(live: RoutedStream) -> StreamState:
    seq = live.stream.sequence
    phase = "held" if live.link is None else "running" if live.is_admitted else "waiting"
    engine = "" if live.link is None else live.link.engine_id
    return StreamState(seq.request_id, engine, phase, seq.prompt_len, seq.length - seq.prompt_len)
