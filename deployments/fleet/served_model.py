"""One model of a front: its streams, with their tokens, parameters and texts, which engines compute."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from deployments.engine.callers import Callers
from deployments.engine.interface import Engine, EngineState, EngineSummary, Readiness, StreamState
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_report import StepStats
from deployments.fleet.model_view import EngineText, ModelViews
from deployments.fleet.placement import Placement
from deployments.links import messages
from deployments.links.affinity import PromptPrefixes
from deployments.links.link import Link, RoutedStream
from llama_core.errors import EngineError, LlamaError, NotReady, QueueFull, RequestAborted
from llama_core.log_lines import current_request_id, of_request, where
from llama_core.scheduling.fair_queue import TIMES_FREE_CAPACITY
from llama_core.scheduling.request import FinishReason, Request, sequences_of
from llama_core.scheduling.request import Sequence as Seq

log = logging.getLogger(__name__)

ASLEEP: Final = Readiness(True, "sleeping", "no engine runs; a request starts one")


class ServedModel(Placement):
    """`models` has it as an `Engine`, and its adapters."""

    def __init__(
        self,
        model_id: str,
        callers: Callers,
        on_step: Callable[[StepStats], None] | None,
        on_end: Callable[[MeasuredStream], None],
        *placement: Any,
    ) -> None:
        """on_step, on_end: for metrics. placement: the other arguments of `Placement`."""
        super().__init__(model_id, *placement)
        self.cache_scope, self.next_seed = callers.cache_scope, callers.next_seed
        self._on_step, self._on_end = on_step, on_end
        self.has_application = False  # whether the latest engine has told its application; the caller sets it
        self.sleeps = False  # its application has no engine, and starts one on a call; the caller sets it
        self._welcomes: Sequence[messages.Welcome] = ()  # that `_adapters` is made of
        self._adapters: dict[str, str] = {}  # digests by name; kept without engines: requests for them wait
        self._live: dict[Seq, RoutedStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # What an engine has computed.

    def on_step(self, link: Link, step: messages.Step) -> None:
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
        details = {detail.number: detail for detail in step.details} if step.details else {}
        intervals: dict[float, int] = {}
        num_sampled = num_prompt = num_hits = 0
        for number, tokens in zip(step.numbers, step.tokens, strict=True):
            live = link.streams.get(number)
            if live is None:  # it has moved on, or nobody reads it
                continue
            stream, seq = live.stream, live.stream.sequence
            if (detail := details.get(number)) is not None and detail.num_cached is not None and seq.num_cached is None:
                num_prompt, num_hits = num_prompt + len(seq.prompt), num_hits + detail.num_cached
            if tokens:
                num_sampled += len(tokens)
                stream.numerics, live.num_failures = link.numerics, 0
                if (seconds := stream.timeline.gained(now_s, step.elapsed_ms)) is not None:
                    # Most streams of a step were in the step before too, so most of them have the same time.
                    seconds /= len(tokens)
                    intervals[seconds] = intervals.get(seconds, 0) + len(tokens)
            try:
                self._push(live, tokens, detail)
            except Exception as error:  # an error of one request must not fail the others
                text = "a request failed while its tokens were decoded to text\n%s"
                log.error(text, where(error), extra=of_request(seq.terms.request_id))
                self._fail(live, EngineError("the tokens of this request could not be decoded to text"))
        if self._on_step is None:
            return
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
            seq.embedding = detail.embedding
            if detail.fault is not None:
                seq.error, seq.finish_reason = messages.error_of(detail.fault), FinishReason.ERROR
        if stream.push(tokens):
            if live.link is not None:
                live.link.cancel([live], is_stop=True)
            seq.finish_reason, seq.error = FinishReason.STOP, None
        if seq.error is not None:
            stream.fail(seq.error)
        if seq.finish_reason is not None:
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
        return ModelViews(self, self._adapters)

    @property
    def text(self) -> EngineText:
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
    def latest(self) -> EngineState:
        """Of the engine that was heard last. Raises NotReady before the first."""
        if self._state is None:
            raise self.readiness().not_ready()
        return self._state

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
        return bool(self.links or self._live or self.sleeps) or is_waited_for

    @property
    def lacks_engine(self) -> bool:
        """Whether streams wait, and no engine takes requests."""
        return bool(self._held) and not any(link.takes_requests for link in self.links)

    def readiness(self) -> Readiness:
        is_asleep = self.sleeps and not self._draining and not any(link.takes_requests for link in self.links)
        return ASLEEP if is_asleep else super().readiness()

    def check_capacity(self, owner: str = "") -> None:
        readiness = self.readiness()
        if not readiness.takes_requests:
            raise readiness.not_ready()
        state, usable = self.latest, [link for link in self.links if link.takes_requests]
        if usable:
            num_waiting = min(link.waiting for link in usable)
        else:  # of those that no engine has had, this front's share of what its engines took
            held = [live.stream.sequence for live in self._held if not live.has_begun]
            num_waiting, num_tokens = len(held), sum(seq.prompt_len for seq in held)
            own = sum(seq.terms.owner == owner for seq in held)
            num_free = max(1, state.max_queue // self._num_fronts) - num_waiting
            is_share = own and own >= TIMES_FREE_CAPACITY * num_free
            if num_free <= 0 or num_tokens > state.max_queue_tokens / self._num_fronts or (owner and is_share):
                raise QueueFull("too many requests wait for an engine", retry_after_s=2.0)
        if num_waiting > state.max_queue:
            raise QueueFull(f"{num_waiting} sequences wait already, the limit is {state.max_queue}", retry_after_s=2.0)

    async def submit(
        self, request: Request, *, is_timed: bool = False, numerics: str = "", text: EngineText | None = None
    ) -> Sequence[SequenceStream]:
        """text: that the request was planned with. numerics: of the engines that began its answer, whose text gives it the same
        prompt."""
        self.check_capacity(request.terms.owner)
        for link in self.links if numerics else ():
            if link.takes_requests and link.continues(numerics) and link.text is not None:
                text = EngineText(link.text, link.tokenizer_digest, link.defaults)
        text = text or self.text
        scope = self.cache_scope(request.terms.owner)
        terms = replace(request.terms, cache_scope=scope, request_id=current_request_id())
        tokenizer = text.text.tokenizer
        sequences = sequences_of(replace(request, terms=terms), tokenizer.n_words, self.latest.max_seq_len)
        request = replace(request, terms=terms, prompts=[seq.prompt for seq in sequences[:: request.n]])  # plain ints
        prefixes = [PromptPrefixes(terms, prompt) for prompt in request.prompts]
        lives = [
            RoutedStream(
                SequenceStream(seq, tokenizer, request, self._cancel, is_timed=is_timed),
                prefixes[i // request.n],
                is_copy=i % request.n > 0,
            )
            for i, seq in enumerate(sequences)
        ]
        for live in lives:
            live.stream.tokenizer_digest = text.tokenizer_digest
            self._live[live.stream.sequence] = live
            live.stream.numerics = numerics
        self._idle.clear()
        try:
            if not await self._submitted(lives, request):
                self._place(live for live in lives if live.stream.sequence in self._live)
        except BaseException:
            for live in lives:
                if live.link is not None:  # another engine may have got it while this was being cancelled
                    live.link.cancel([live])
                self._forget(live)
            raise
        return [live.stream for live in lives]

    async def _submitted(self, lives: Sequence[RoutedStream], request: Request) -> bool:
        """Whether an engine has taken the request. Raises the refusal of the last one whose queue is full."""
        refusal: QueueFull | None = None
        digest = lives[0].stream.tokenizer_digest
        usable = [
            link
            for link in self.links
            if link.takes_requests
            and link.tokenizer_digest == digest
            and link.has_adapter(request.terms.adapter)
            and link.continues(lives[0].stream.numerics)
        ]
        self._num_chosen += 1
        for link in self._by_policy(usable, lives):
            try:
                if await link.submit(lives, request):
                    return True
            except QueueFull as error:
                refusal = error
            except EngineError as error:
                log.warning("engine %s of %s refuses a request: %s", link.name, self.model_id, error.message)
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # it holds this frame
        return False

    async def readmit(self, streams: Sequence[SequenceStream], *, is_timed: bool = False) -> None:
        self.check_capacity()
        lives = []
        for stream in streams:
            stream.begin_again(is_timed=is_timed)
            if not stream.ended:
                seq = stream.sequence
                seq.terms = replace(seq.terms, request_id=current_request_id())
                self._live[seq] = live = RoutedStream(stream, PromptPrefixes(seq.terms, seq.prompt), is_readmitted=True)
                lives.append(live)
        if lives:
            self._idle.clear()
            self._place(lives)

    def abort(self, request_id: str) -> bool:
        """End the request with this id; its reader gets RequestAborted. False if it has no stream here."""
        found = [live.stream for seq, live in self._live.items() if request_id and seq.terms.request_id == request_id]
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
        if self._balancing is not None:
            self._balancing.cancel()
        links, self.links = self.links, []  # so that none is met again
        for link in links:
            link.close()

    def describe(self) -> EngineState:
        """Of the engine that was heard last, with the load of all of them."""
        states = [link.state for link in self.links if link.state is not None]
        return replace(
            self.latest,
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


def _summary(link: Link) -> EngineSummary:
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
    return StreamState(seq.terms.request_id, engine, phase, seq.prompt_len, seq.length - seq.prompt_len)
