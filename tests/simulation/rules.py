"""What must hold of a simulated fleet at every moment, by what the simulation knows of its processes."""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

from deployments.fleet.directory import CALL_TIMEOUT_S
from deployments.fleet.fleet import Fleet
from deployments.fleet.placement import Placement
from deployments.fleet.served_model import ServedModel
from deployments.links.front_server import FrontServer
from deployments.links.front_session import FrontSession
from deployments.links.link import Link, RoutedStream
from deployments.links.messages import BEAT_S, CLOSE_AFTER_S
from deployments.replicas.front_process import MAX_SEARCH_S
from llama_core.scheduling.request import Sequence as Seq
from llama_core.scheduling.scheduler import Scheduler
from tests.simulation.expected_answers import Wrong
from tests.simulation.processes import OwnRanks, SimulatedEngine, SimulatedFront
from tests.simulation.simulated import Simulated
from tests.support.virtual_loop import network

LOOK_S: Final = 0.25
SILENCE_S: Final = 2.05  # until an engine's silence is noticed
DEAF_S: Final = SILENCE_S + LOOK_S + BEAT_S
WAIT_S: Final = 1.0 + LOOK_S  # beside a free slot
SETTLED_S: Final = 6.0  # after a disturbance between two processes, connections are made again
ORPHAN_S: Final = 1.5

EXPECTED_ERRORS: Final = ("recovering", "the engine has failed", "the start failed", "is left out", "is refused")


class Rules:
    def __init__(self, world: Simulated) -> None:
        self._world = world
        self.wrong: list[str] = []  # what was found in calls of the product, which would catch an exception
        self._since: dict[Hashable, float] = {}  # since when something lasts
        self._disturbed_s: dict[tuple[SimulatedFront, SimulatedEngine], float] = {}
        self._troubled_s: dict[SimulatedFront, float] = {}  # when an engine was silent or gone
        self._suspicions: dict[SimulatedFront, int] = {}
        self._owners: dict[str, None] = {}
        self._first_chosen: dict[
            Placement, dict[tuple[int, ...], int]
        ] = {}  # prompts, and among how many equal engines
        # Length; weights and ranks of its latest tokens.
        self._computed_by: dict[RoutedStream, tuple[int, int, int]] = {}

    def look(self) -> None:
        if self.wrong:
            raise Wrong(self.wrong[0])
        self._note_disturbances()
        for front, model in self.models():
            self._check_owners(model)
            for link in model.links:
                self._check_link(front, link)
            for live in list(model._live.values()):
                self._check_wait(front, model, live)
        for front in self._world.fronts:
            if front.fleet is not None and not front.is_gone:
                self._check_front(front, front.fleet)
        self._check_held()
        for process, server in self._servers():
            self._check_shares(process, server)
        for engine in self._world.engines:
            self.lasts(("started", engine), engine.invitation is not None)
            self.lasts(("up", engine), not engine.process.stands_still)
            if not (engine.is_gone or engine.process.stands_still or engine.server is None):
                for connection in engine.server.sessions:
                    self._check_connection(engine, connection)

    def lasts(self, what: Hashable, is_so: bool) -> float:
        """For how many seconds."""
        if not is_so:
            self._since.pop(what, None)
            return 0.0
        return time.monotonic() - self._since.setdefault(what, time.monotonic())

    def models(self) -> Iterator[tuple[SimulatedFront, ServedModel]]:
        for front in self._world.fronts:
            if not front.is_gone:
                for model in front.models:
                    yield front, model

    # What the simulation knows.

    def is_settled(self, front: SimulatedFront, engine: SimulatedEngine) -> bool:
        """Nothing has come between the two for a while."""
        return time.monotonic() - self._disturbed_s.get((front, engine), time.monotonic()) > SETTLED_S

    def is_alone_to_blame(self, front: SimulatedFront) -> bool:
        """No engine has been silent, or gone, for a while."""
        return time.monotonic() - self._troubled_s.get(front, 0.0) > SETTLED_S

    def disturb(self, engine: SimulatedEngine) -> None:
        for front in self._world.fronts:
            self._disturbed_s[front, engine] = time.monotonic()

    def _note_disturbances(self) -> None:
        for front in self._world.fronts:
            for engine in self._world.engines:
                pair = front.process, engine.process
                is_apart = any(network()._is_silent(*each) or each in network().delay_s for each in (pair, pair[::-1]))
                is_still = any(process.stands_still for process in pair)
                out_s = self.lasts(("out", front, engine), not engine.serves)
                if is_apart or 0.0 < out_s < CLOSE_AFTER_S:
                    self._troubled_s[front] = time.monotonic()
                if is_apart or is_still or not engine.serves or (front, engine) not in self._disturbed_s:
                    self._disturbed_s[front, engine] = time.monotonic()

    def _engine_of(self, link: Link | None) -> SimulatedEngine | None:
        found = (each for each in self._world.engines if link is not None and each.service.engine_id == link.engine_id)
        return next(found, None)

    # Rules.

    def _check_front(self, front: SimulatedFront, fleet: Fleet) -> None:
        num_suspicions = fleet._events["suspected"]
        if num_suspicions > self._suspicions.get(front, 0) and self.is_alone_to_blame(front):
            raise Wrong("a front suspects engines because it stood still itself")
        self._suspicions[front] = num_suspicions
        for application in self._world.applications:
            model = fleet._models.get(application.model)
            is_removed = application.name not in self._world.cluster.running and not self._world.cluster.is_away
            is_left = is_removed and model is not None and not (model.links or front.process.stands_still)
            if self.lasts(("removed", front, application), is_left) > MAX_SEARCH_S + CALL_TIMEOUT_S + 3.0:
                raise Wrong("a model of an application that has been removed is served")

    def _check_held(self) -> None:
        """All fronts together hold no more new requests than their engines would."""
        held: dict[str, list[int]] = {}
        for _, model in self.models():
            new = [live for live in model._held if not (live.placed_s or live.has_begun or live.is_readmitted)]
            held.setdefault(model.model_id, []).append(len(new))
        for counts in held.values():
            limit = max(self._world.setting.max_queue, len(counts))
            if sum(counts) > limit + 2 * len(counts):  # with the other choices of the latest request of each
                raise Wrong(f"fronts hold {counts} requests, and their engines took {limit}")

    def on_moved(
        self, model: Placement, former: Link, lives: Sequence[RoutedStream], silent_since_s: float | None
    ) -> None:
        """Streams of an engine that ends, or is silent since then, have other engines now, or are held."""
        front = next(front for front, other in self.models() if other is model)
        to_come = {entry.digest for entry in self._world.cluster.entries.get(model.model_id, {}).values()} | {""}
        for live in lives:
            if live.link is None:
                is_lost = live.stream.sequence.terms.adapter not in to_come and not live.stream.ended
                if is_lost and not (former.is_lost or former.is_suspected):
                    self.wrong.append("a stream leaves the only engine with its adapter")
            elif silent_since_s is not None and (engine := self._engine_of(live.link)) is not None:
                silent_s = network().silent.get((engine.process, front.process))
                if silent_s is not None and live.link.heard_s <= silent_s < silent_since_s + BEAT_S:
                    self.wrong.append("a front moves streams to an engine that it does not hear either")

    def on_choice(self, model: Placement, links: Sequence[Link], live: RoutedStream, chosen: Link) -> None:
        """A front has chosen an engine. Of engines without a difference it must not take the first one each time."""
        tally = self._first_chosen.setdefault(model, {})
        least = min((link.num_sequences, link.queued_tokens) for link in links)
        equal = [link for link in links if link.is_ready and (link.num_sequences, link.queued_tokens) == least]
        known = any(
            links[0].prefixes.num_known(live.prefixes.keys(link.state.block_size)) for link in links if link.state
        )
        if len(equal) > 1 and chosen in equal and not known:
            tally[tuple(live.prefixes.prompt)] = len(equal) if chosen is equal[0] else 0
        if all(tally.values()) and math.prod(tally.values()) > 2**30:
            self.wrong.append(f"a front chooses the first engine {len(tally)} times, and others are equal")

    def on_close(self, connection: FrontSession, reason: str) -> None:
        """An engine closes its connection with a front."""
        front = self._front_of(connection)
        engine = next(each for each in self._world.engines if each.server is connection.server)
        is_expected = reason in ("the engine ends", "the engine has failed", "cut")
        is_of_silence = "it has said nothing" in reason or reason == "no greeting"
        if front is not None and not is_expected and (not is_of_silence or self.is_settled(front, engine)):
            self.wrong.append(f"an engine closes the connection with a front: {reason}")

    def _check_owners(self, model: ServedModel) -> None:
        owners: dict[Any, int] = {}
        for link in model.links:
            for number, live in link.streams.items():
                if live.link is not link or live.number != number:
                    raise Wrong("a stream is counted for an engine that does not compute it")
                owners[live.stream] = owners.get(live.stream, 0) + 1
        if any(count > 1 for count in owners.values()):
            raise Wrong("a stream has two engines")

    def _check_link(self, front: SimulatedFront, link: Link) -> None:
        engine = self._engine_of(link)
        if engine is None:
            return
        is_known = link.is_suspected or link.is_lost or link.is_leaving
        is_up = self.lasts(("front up", front), not front.process.stands_still) > SILENCE_S + BEAT_S
        is_known |= not is_up or self.lasts(("linked", link), True) < SILENCE_S + BEAT_S
        is_silent = engine.process.stands_still or network()._is_silent(engine.process, front.process)
        if is_silent and not is_known and (silent_s := time.monotonic() - link.heard_s) > SILENCE_S:
            raise Wrong(f"a silent engine is not suspected after {silent_s:.2f} s")
        is_deaf = network()._is_silent(front.process, engine.process)
        late = network().delay_s
        late_s = late.get((front.process, engine.process), 0.0) + late.get((engine.process, front.process), 0.0)
        if self.lasts(("deaf", link), is_deaf and not is_silent and not is_known) > DEAF_S + late_s:
            raise Wrong("an engine that does not hear is not suspected")
        has_other = self.is_settled(front, engine) and link.defaults != engine.service.sampling_defaults
        if self.lasts(("defaults", link), has_other) > 3 * BEAT_S:
            raise Wrong("a front has other defaults than its engine")

    def _check_wait(self, front: SimulatedFront, model: ServedModel, live: RoutedStream) -> None:
        seq, engine = live.stream.sequence, self._engine_of(live.link)
        length, *_ = self._computed_by.get(live, (seq.prompt_len, 0, 0))
        is_known = seq.length == length or engine is not None
        if seq.length > length and engine is not None:
            self._computed_by[live] = seq.length, engine.weights, engine.service.num_ranks_now
        runs = live.stream.ended or (engine is not None and engine.serves and self._has_slot(engine, live))
        could_run = is_known and not runs and any(self._fits(front, model, each, live) for each in self._world.engines)
        is_unnoticed = live.link is not None and (engine is None or not self.is_settled(front, engine))
        whole_s = self.lasts(("waits", live), could_run)
        here_s = self.lasts(("waits", live, live.link, live.placed_s), could_run)
        if whole_s > WAIT_S + 3 * DEAF_S or (here_s > WAIT_S and not is_unnoticed):
            free = [each for each in self._world.engines if self._fits(front, model, each, live)]
            links = [(link.engine_id[:6], link.is_ready, link.num_free) for link in model.links]
            raise Wrong(
                f"a stream with {seq.length - seq.prompt_len} tokens waits beside a free slot, at {time.monotonic():.2f} s: "
                f"{live.link and live.link.engine_id[:6]}, since {live.placed_s:.2f}, moved {live.num_moves} times, "
                f"adapter {seq.terms.adapter[:6]!r}; free: {[each.service.engine_id[:6] for each in free]}; "
                f"the front knows {links}"
            )

    def _has_slot(self, engine: SimulatedEngine, live: RoutedStream) -> bool:
        assert engine.server is not None
        for connection in engine.server.sessions:
            if _link_of(connection) is live.link and (stream := connection.streams.get(live.number)) is not None:
                return stream.sequence.slot is not None
        return False

    def _fits(self, front: SimulatedFront, model: ServedModel, engine: SimulatedEngine, live: RoutedStream) -> bool:
        if engine.application.model != model.model_id or not engine.serves or not self.is_settled(front, engine):
            return False
        seq, (_, weights, ranks) = live.stream.sequence, self._computed_by.get(live, (0, engine.weights, 0))
        if (weights, ranks or engine.service.num_ranks_now) != (engine.weights, engine.service.num_ranks_now):
            return False
        assert engine.server is not None
        if engine.server._tokenizer_digest != live.stream.tokenizer_digest:
            return False
        # A client that comes back needs the engines that its answer began with, also for a choice without tokens.
        of_engine = (link for link in model.links if link.engine_id == engine.service.engine_id)
        if live not in self._computed_by and not any(link.continues(live.stream.numerics) for link in of_engine):
            return False
        scheduler = engine.service.loop.scheduler
        has_free = scheduler.num_running + scheduler.num_waiting < engine.service.config.max_batch_size
        if self.lasts(("free", engine), has_free) < 1.0:
            return False
        places = scheduler.adapter_places
        return not seq.terms.adapter or seq.terms.adapter in places.held

    def _check_connection(self, engine: SimulatedEngine, connection: FrontSession) -> None:
        front = self._front_of(connection)
        silent_s = time.monotonic() - connection.heard_s
        has_stood = self.lasts(("up", engine), True) < CLOSE_AFTER_S + 2.0
        if silent_s > CLOSE_AFTER_S + 3 * BEAT_S and not has_stood:
            raise Wrong(f"an engine keeps {len(connection.streams)} streams of a front that has vanished")
        link = _link_of(connection)
        if front is None or link is None:
            return
        self._check_turns(connection, link)
        is_quiet = self.is_settled(front, engine)
        for number in list(connection.streams):
            if self.lasts(("orphan", connection, number), is_quiet and number not in link.streams) > ORPHAN_S:
                raise Wrong("an engine computes a stream that its front does not know")

    def _check_turns(self, connection: FrontSession, link: Link) -> None:
        """A stream that has begun elsewhere comes before those that have not."""
        delay_s = 0.1 + 2 * self._world.setting.step_s
        pairs = [
            (stream, link.streams[number])
            for number, stream in connection.streams.items()
            if number in link.streams and not stream.sequence.terms.adapter
        ]
        for first, begun in pairs:
            if first.timeline.admitted_s is None and begun.has_begun and not begun.is_readmitted:
                for stream, live in pairs:
                    admitted_s, first_s = stream.timeline.admitted_s or 0.0, live.stream.timeline.admitted_s or 0.0
                    if admitted_s > first.timeline.submitted_s + delay_s and first_s >= live.placed_s:
                        raise Wrong("a new stream gets a slot before one that has begun")

    def _servers(self) -> Iterator[tuple[SimulatedEngine | OwnRanks, FrontServer]]:
        """All that compute."""
        for engine in self._world.engines:
            if engine.serves and engine.server is not None:
                yield engine, engine.server
        for front in self._world.fronts_with_ranks():
            if front.own.fronts is not None and front.engine.readiness().ready:
                yield front, front.own.fronts

    def _check_shares(self, process: SimulatedEngine | OwnRanks, server: FrontServer) -> None:
        """Owners share slots, and adapters' places: none has two more than one that waits for them."""
        scheduler, limit_s = server.engine_loop.scheduler, 1.0 + 20 * self._world.setting.step_s
        running, waiting = defaultdict[str, list[Seq]](list), defaultdict[str, list[Seq]](list)
        for seq in scheduler.live():
            (waiting if seq.slot is None else running)[seq.terms.owner].append(seq)
        adapters = {owner: {seq.terms.adapter for seq in own} - {""} for owner, own in running.items()}
        users = Counter(adapter for own in adapters.values() for adapter in own)
        # Of an adapter that several owners use, none gives up the place, and none that of its oldest sequence.
        may_give = [own for own in adapters.values() if sum(users[adapter] == 1 for adapter in own) > 1]
        most, most_places = max(map(len, running.values()), default=0), max(map(len, may_give), default=0)
        is_stalled = server.engine_loop.stalled_s() > 0.5  # its ranks hang
        has_begun = bool(scheduler.admission.waiting._begun) or is_stalled
        self._owners |= dict.fromkeys([*running, *waiting])
        for owner in self._owners:
            needs_place = {seq.terms.adapter not in {"", *scheduler.adapter_places.held} for seq in waiting[owner][:1]}
            has_less = needs_place == {False} and not has_begun and most >= len(running[owner]) + 2
            if self.lasts(("slots", process, owner), has_less) > limit_s:
                raise Wrong("an owner waits who has two slots less than another one")
            has_less = needs_place == {True} and not is_stalled and most_places >= len(adapters.get(owner, ())) + 2
            if self.lasts(("places", process, owner), has_less) > limit_s:
                raise Wrong("an owner waits who has two adapters' places less than another one")

    def on_refused(self, scheduler: Scheduler, lengths: Sequence[int], owner: str, message: str) -> None:
        """An engine refuses a new request because too many wait."""
        waiting: dict[str, int] = {}
        owners = set()
        for seq in scheduler.live():
            owners.add(seq.terms.owner)
            # One that has begun does not give way.
            if seq.slot is None and not seq.progress.has_begun:
                waiting[seq.terms.owner] = waiting.get(seq.terms.owner, 0) + 1
        if owner in owners or len(lengths) > 1:
            return
        if scheduler.num_waiting < len(scheduler.admission.free_slots):
            self.wrong.append(f"{owner} is refused beside a free slot: {message}")
        limit = scheduler.admission._max_waiting
        is_over = (
            limit is not None and scheduler.num_waiting > limit
        )  # with streams of other engines, or of a former limit
        if max(waiting.values(), default=0) > 1 and not is_over:
            self.wrong.append(f"{owner} has nothing in a queue that others fill, and is refused: {message}, {waiting}")

    def _front_of(self, connection: FrontSession) -> SimulatedFront | None:
        link = _link_of(connection)
        for front, model in self.models():
            if link in model.links:
                return front
        return None

    def check_nothing_left(self) -> None:
        for _, model in self.models():
            if model._live or model._held:
                raise Wrong(f"a front has {len(model._live)} streams left, {len(model._held)} of them held")
        services = [engine.service for engine in self._world.engines if engine.serves]
        services += [front.engine for front in self._world.fronts_with_ranks()]
        for service in services:
            if service.readiness().phase != "ready":
                continue
            scheduler = service.loop.scheduler
            if scheduler.num_running or scheduler.num_waiting or service.loop.num_live:
                raise Wrong(f"an engine has {scheduler.num_running} and {scheduler.num_waiting} sequences left")
            if scheduler.pool.num_used:
                raise Wrong(f"an engine has {scheduler.pool.num_used} blocks left")
        for front in self._world.fronts:
            if not front.is_gone and front.http_app.stored._kept.num_bytes:
                raise Wrong("a front keeps streams beyond its window")


def _link_of(connection: FrontSession) -> Link | None:
    """The other end of a connection that has not ended."""
    peer = getattr(getattr(connection, "_transport", None), "peer", None)
    return peer.protocol if peer is not None and not peer.is_closed else None


class Log(logging.Handler):
    """What the product reports as an error, but for what it is to report."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not any(expected in message for expected in EXPECTED_ERRORS):
            self.unexpected.append(message)
