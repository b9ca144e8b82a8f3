"""Which engine computes each stream of one model. The front owns the streams; engines come, go and fall silent.

When an engine ends, another one with equal numerics continues its streams from the tokens so far, and samples the same next
tokens, because a sample depends on (seed, position) alone. Without such an engine the front holds the stream.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from deployments.engine.interface import EngineState, Readiness
from deployments.fleet import routing
from deployments.fleet.facts import Costs, Waiting, costs_of, facts_of, look_up, turn, waiting_at
from deployments.fleet.model_view import EngineText
from deployments.links import messages
from deployments.links.affinity import EXPECTED_S
from deployments.links.link import MAX_GAP_S, Link, RoutedStream
from deployments.links.messages import BEAT_S, CLOSE_AFTER_S, LOAD_S
from llama_core.errors import EngineError, InvalidParameter, LlamaError, NotReady, PoisonRequest, QueueFull
from llama_core.log_lines import where
from llama_core.text.model_text import ModelText

log = logging.getLogger(__name__)

TICK_S: Final = BEAT_S
# A stream waits at least so long at an engine before it moves to another; twice as long after each move.
PATIENCE_S: Final = 0.25
MARGIN: Final = 1.25  # another engine must be this much sooner, because estimates err
MAX_LOOKED_AT: Final = 32  # waiting streams, each time
MAX_FAILURES: Final = 4  # engines that end in turn with one stream in flight: the stream is the cause


class Placement(ABC):
    """`add` engines; the rest follows from what their links tell."""

    def __init__(
        self,
        model_id: str,
        hold_timeout_s: float,
        events: dict[str, int],
        on_lost: Callable[[Link], None] = lambda link: None,
        on_unserved: Callable[[], None] = lambda: None,
        policy: str = "expected_time",
    ) -> None:
        """hold_timeout_s: how long a stream waits for an engine that can continue it. events: counts of FLEET_EVENTS. on_lost:
        a link has ended. on_unserved: no engine takes requests. policy: one of `routing.POLICIES`."""
        self.model_id = model_id
        self.links: list[Link] = []
        self.hold_timeout_s = hold_timeout_s
        self.is_removed = False  # with all applications that had the model
        self._events, self._on_lost, self._on_unserved = events, on_lost, on_unserved
        self._policy = routing.POLICIES[policy]
        self._last_text: EngineText | None = None
        self._state: EngineState | None = None  # of the engine that was heard last
        self._num_fronts = 1  # of this model's engines
        self._held: dict[RoutedStream, None] = {}
        self._lost_s = 0.0  # when the last engine was lost, by time.monotonic
        self._draining = self._stood_still = False
        self._num_chosen = 0  # engines for requests, but for moves of waiting ones
        self._balancing: asyncio.TimerHandle | None = None
        self._ticking = asyncio.create_task(self._tick_always())

    @abstractmethod
    def on_step(self, link: Link, step: messages.Step) -> None: ...
    @abstractmethod
    def _fail(self, live: RoutedStream, error: LlamaError) -> None:
        """End a stream."""

    # Engines come and go.

    def add(self, link: Link, text: ModelText) -> None:
        """Use an engine that has greeted this front. text: its model's."""
        assert link.welcome is not None and link.state is not None
        link.text, self._state, self._num_fronts = text, link.state, link.num_fronts
        self._last_text = EngineText(text, link.tokenizer_digest, link.defaults)
        self.is_removed = False
        self.links.append(link)
        link.attach(self)
        self._place(list(self._held))
        for other in self.links:
            if other.is_leaving:
                self._move(other, has_failed=False, keeps=True)

    def on_state(self, link: Link) -> None:
        assert link.state is not None
        self._state, self._num_fronts = link.state, link.num_fronts
        if link.is_ready and not link.was_ready:
            self._place(list(self._held))
        elif link.streams and not (link.is_ready or link.is_deaf):
            # Its ranks are replaced, or it ends: streams go on elsewhere, if they can.
            self._move(link, has_failed=not link.is_leaving, keeps=True)
        link.was_ready = link.is_ready

    def on_goodbye(self, link: Link, *, has_successor: bool) -> None:
        """Streams stay there where no other engine can continue them and no successor is to come, or none with their
        adapter."""
        log.info("engine %s of %s ends: its %d streams move", link.name, self.model_id, len(link.streams))
        self._note_loss()
        self._move(link, has_failed=False, keeps=not has_successor)

    def on_lost(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)
            self._note_loss()
            level = logging.INFO if link.is_leaving else logging.WARNING
            log.log(level, "engine %s of %s is gone: its %d streams move", link.name, self.model_id, len(link.streams))
            self._move(link, has_failed=not link.is_leaving, keeps=False)
            self._on_lost(link)

    def on_refused(self, link: Link, live: RoutedStream, error: LlamaError) -> None:
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

    def _move(self, link: Link, *, has_failed: bool, keeps: bool, silent_since_s: float | None = None) -> None:
        """Continue the streams of `link`, which takes no requests any more, elsewhere. keeps: those that no other engine can
        continue now stay there; so do those of adapters that have been unloaded, which no engine to come has, until the
        connection ends. silent_since_s: of a silent link; only engines that have been heard meanwhile continue them."""
        assert link.welcome is not None
        adapters = set() if keeps else {"", *link.welcome.adapters.values()}  # whose streams may wait for an engine
        lives = [live for live in link.streams.values() if live.is_accepted]
        if not link.is_lost:
            adapter = {live: live.stream.sequence.terms.adapter for live in lives}
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
        for live in sorted(lives, key=turn):
            able = self._able(live, silent_since_s)
            usable = [link for link in able if not link.is_full and link.engine_id not in live.refused_by]
            if not usable:
                self._hold(live, has_engine=any(live.refused_by.get(link.engine_id, True) for link in able))
                continue
            live.is_copy = False  # its prompt's first choice may be elsewhere
            self._num_chosen += 1
            self._by_policy(usable, [live])[0].take_on(live)
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

    def _hold(self, live: RoutedStream, has_engine: bool) -> None:
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
        is_new = live not in self._held
        self._events["held"] += is_new
        self._held[live] = None
        if is_new and not self.links:
            self._on_unserved()

    def _has_other_tokenizer(self, live: RoutedStream) -> bool:
        """Whether requests are taken, and no engine knows the tokens of this one's prompt."""
        digests = {link.tokenizer_digest for link in self.links if not link.is_leaving}
        takes_requests = any(link.takes_requests for link in self.links)
        return takes_requests and live.stream.tokenizer_digest not in digests

    def _able(self, live: RoutedStream, silent_since_s: float | None = None, but: Link | None = None) -> list[Link]:
        """The engines that can compute the stream: with the tokenizer of its prompt, and the numerics of its first tokens."""
        stream, adapter = live.stream, live.stream.sequence.terms.adapter
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

    def on_load(self, link: Link) -> None:
        if self._balancing is None and link.has_waiting and len(self.links) > 1:
            num_streams = sum(len(each.streams) for each in self.links)
            delay_s = LOAD_S * (1 + num_streams / 256)  # `_balance` takes about 1 ms for 1,000
            self._balancing = asyncio.get_running_loop().call_later(delay_s, self._balance)

    def _balance(self) -> None:
        """Streams that wait at an engine move to one that would begin them sooner: first those that have begun, then the
        oldest."""
        self._balancing, now_s = None, time.monotonic()
        ready = [link for link in self.links if link.is_ready and not link.is_full]
        if len(self.links) < 2 or not ready or self._stood_still:
            return
        costs, num_looked_at, taken = costs_of(self.links), 0, dict.fromkeys(self.links, (0, 0))
        for each in sorted(self._may_gain(ready, costs, now_s), key=lambda each: turn(each.live)):
            live, link = each.live, each.link
            able = [other for other in self._able(live, but=link) if not other.is_full]
            usable = [other for other in able if other.engine_id not in live.refused_by]
            if not usable:
                continue
            num_looked_at += 1
            if num_looked_at > MAX_LOOKED_AT:
                break
            due_s = live.due_s
            best = self._by_policy(usable, [live])[0]
            here, there = each.facts(costs, *taken[link]), facts_of(best, [live], costs)
            is_sooner = (MARGIN * there.first_token_ms + here.step_ms) * 2**live.num_moves < here.first_token_ms
            # Where the estimate was wrong, it has waited as long as beginning elsewhere takes.
            waited_ms = 1e3 * (now_s - live.placed_s)
            if is_sooner or (best.num_free > 0 and now_s > due_s and waited_ms > there.first_token_ms):
                link.cancel([live])
                taken[link] = taken[link][0] + 1, taken[link][1] + live.num_expected
                live.num_moves += 1
                live.is_copy = False
                self._events["moved"] += 1
                best.take_on(live)
                self._resume(live)
            else:
                live.due_s = due_s

    def _may_gain(self, ready: Sequence[Link], costs: Costs, now_s: float) -> Iterator[Waiting]:
        """Streams that have waited for a while, and are overdue beside a free slot, or have more work before them than some
        engine."""
        least_ms = min(facts_of(link, (), costs).first_token_ms for link in ready)
        has_slot = any(link.num_free > 0 for link in ready)
        for link in self.links:
            for each in waiting_at(link):
                is_overdue = has_slot and now_s > each.live.due_s
                if is_overdue or each.facts(costs).first_token_ms > least_ms:
                    if now_s - each.live.placed_s > PATIENCE_S * 2**each.live.num_moves:
                        yield each
                elif not has_slot:
                    break  # nor would those before it gain

    async def _tick_always(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            try:
                self._tick(due_s, time.monotonic())
            except Exception as error:  # the next tick may succeed
                log.error("the streams of %s could not be looked after\n%s", self.model_id, where(error))

    def _tick(self, due_s: float, now_s: float) -> None:
        held_tokens = sum(live.stream.sequence.length for live in self._held)
        for link in self.links:
            link.tell_alive(len(self._held), held_tokens)
        # After a pause of this process itself, each engine first tells once more what it hears.
        stood_still, self._stood_still = self._stood_still, now_s - due_s >= TICK_S
        if not (stood_still or self._stood_still):
            self._suspect_silent(now_s)
            self._place(list(self._held))
            for link in self.links:
                self.on_load(link)
                for live in link.streams.values():
                    if not live.is_admitted and now_s - live.expected_s > EXPECTED_S:
                        link.expect(live)
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

    def _by_policy(self, links: Sequence[Link], lives: Sequence[RoutedStream]) -> Sequence[Link]:
        """For the prompts of these streams together, the best one first."""
        if not links or links[0].is_only:
            return links
        name, costs = look_up(links, lives), costs_of(links)
        by_id = {link.engine_id: link for link in links}
        facts = [facts_of(link, lives, costs) for link in links]
        ordered = self._policy(facts, routing.Prompt(name, self._num_chosen))
        for live in lives:
            live.due_s = time.monotonic() + ordered[0].first_token_ms / 1e3
        return [by_id[each.engine] for each in ordered]
