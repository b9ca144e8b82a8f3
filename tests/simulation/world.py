"""Fronts, engines and clients of one history in a virtual loop."""

import asyncio
import logging
import random
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final
from unittest import mock

from cluster.wire import tls
from deployments.engine import service
from deployments.fleet import fleet
from deployments.fleet.cluster import ENGINE
from deployments.fleet.loaded_adapters import AdapterLoader
from deployments.links import front_server, model_files
from deployments.links.engine_link import EngineLink
from deployments.links.front_server import FrontConnection
from deployments.replicas.front_process import MAX_SEARCH_S
from llama_core.errors import ConfigError, LlamaError, NotReady, QueueFull, RankFailure
from llama_core.log_lines import where
from llama_core.scheduling.scheduler import Scheduler
from llama_core.text.model_text import ModelText
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.conftest import GOLDEN
from tests.simulation.clients import LATE_S, Client
from tests.simulation.expected_answers import Origin, Wrong
from tests.simulation.history import LASTS_S, Event, Setting, drawn
from tests.simulation.processes import (
    ADAPTERS,
    OWNERS,
    Application,
    FleetFront,
    OwnRanks,
    Release,
    SimulatedEngine,
    SimulatedFront,
)
from tests.simulation.rules import LOOK_S, Log, Rules
from tests.support.fake_cluster import FakeCluster, Member
from tests.support.virtual_loop import VirtualLoop, listener, network
from tests.support.virtual_network import Process

QUIET_S: Final = 240.0  # after the last fault, for everything to end
DAY_S: Final = 20.0  # of the loop's time: templates write the date into prompts
CHANGES: Final = ("defaults", "update", "bad update", "adapter", "no adapter", "fewer ranks", "remove", "rival")


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.cluster = FakeCluster()
        self.applications = [Application(number) for number in range(setting.num_applications)]
        self.tokenizer: Tokenizer = load_tokenizer(GOLDEN / "mp2" / "tokenizer.model", None)
        self.adapter_names: Sequence[str] = ("a", "b") if setting.form == "fleet" else ()
        self.fronts: list[SimulatedFront] = []
        self.engines: list[SimulatedEngine] = []
        self.clients: list[Client] = []
        self.rules = Rules(self)
        self.may_change = False  # what an answer is computed from
        self.num_ends = 0  # of engines and ranks
        self._weights: dict[Application, list[int]] = {application: [0] for application in self.applications}
        self._asking: list[asyncio.Task[None]] = []
        self._effects: list[asyncio.Task[Any]] = []
        self._at_suspicion: list[Callable[[], object]] = []
        self._still_s: dict[SimulatedFront, float] = {}

    # For clients and rules.

    def origins(self, application: Application, adapter: str) -> list[Origin]:
        digests = self.cluster.digests.get(f"{application.model}-{adapter}", []) if adapter else [""]
        return [Origin(weights, digest) for weights in self._weights[application] for digest in digests]

    def open_fronts(self) -> list[SimulatedFront]:
        return [front for front in self.fronts if front.is_open and not (front.is_gone or front.is_draining)]

    def fronts_with_ranks(self) -> list[OwnRanks]:
        return [front for front in self.fronts if isinstance(front, OwnRanks) and not front.is_gone]

    def serves(self, front: SimulatedFront, application: Application) -> bool:
        if isinstance(front, OwnRanks):
            return front.engine.readiness().ready
        return any(
            engine.application is application
            and engine.serves
            and self.rules.is_settled(front, engine)
            # Serve tells fronts of an engine when its start has ended, which waits for fronts that do not answer.
            and (engine.invitation is not None and self.rules.lasts(("started", engine), True) > MAX_SEARCH_S + 2.0)
            for engine in self.engines
        )

    def check_deadline(self, front: SimulatedFront, seconds: float, limit_s: float) -> None:
        if seconds > limit_s + LATE_S and time.monotonic() - self._still_s.get(front, -100.0) > seconds + 10.0:
            raise Wrong(f"an answer with a limit of {limit_s:g} s has taken {seconds:.1f} s")

    # A history.

    async def run(self, events: Sequence[Event]) -> None:
        self.cluster.running = {"llama", *(application.name for application in self.applications)}
        for application in self.applications:
            self.cluster.args[application.name] = application.args(self.setting)
        for _ in range(self.setting.num_fronts):
            await self._new_front()
        for number in self.setting.engines if self.setting.form == "fleet" else ():
            await self._new_engine(self.applications[number])
        await asyncio.sleep(2.0)
        looking = asyncio.ensure_future(self._look_always())
        began_s = time.monotonic()
        for event in events:
            if (wait_s := began_s + event.at_s - time.monotonic()) > 0:
                await self._unless_wrong(asyncio.sleep(wait_s), looking)
            self._happens(event)
            self.rules.look()
        await self._unless_wrong(asyncio.sleep(max(0.0, began_s + LASTS_S - time.monotonic())), looking)
        await self._unless_wrong(asyncio.gather(*self._effects), looking)
        network().delay_s.clear()
        network().heal()
        if self._asking:
            await self._unless_wrong(asyncio.wait(self._asking, timeout=QUIET_S), looking)
        left = [
            (client.name, client.model, client.num_tokens)
            for client, task in zip(self.clients, self._asking, strict=True)
            if not task.done()
        ]
        if left:
            raise Wrong(f"{QUIET_S:g} s after the last fault these wait: {left}")
        await asyncio.sleep(self.setting.window_s + 3.0)
        self.rules.check_nothing_left()
        looking.cancel()

    async def _unless_wrong(self, waited: Any, looking: "asyncio.Task[None]") -> None:
        """Wait for this, and raise what a client or a rule has found meanwhile."""
        main = asyncio.ensure_future(waited)
        while not main.done():
            asking = [task for task in self._asking if not task.done()]
            await asyncio.wait((main, looking, *asking), return_when=asyncio.FIRST_COMPLETED)
            for task in (looking, *self._asking, *self._effects):
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    main.cancel()
                    raise error
        await main

    async def _look_always(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for front in self.fronts:
                if front.process.stands_still:
                    self._still_s[front] = time.monotonic()
            self.rules.look()

    async def end(self) -> None:
        for task in (*self._asking, *self._effects):
            task.cancel()
        network().end_faults()
        await asyncio.gather(*(front.stop() for front in self.fronts))
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    # What happens.

    def _happens(self, event: Event) -> None:
        if event.kind in CHANGES:
            self.may_change = True
        if event.kind == "request":
            self._ask(event)
        elif event.kind == "burst":
            for number in range(int(event.size)):
                one = replace(event, which=event.which * 1000 + number, size=10 + number % 30)
                self._ask(one, OWNERS[event.which % len(OWNERS)])
        elif event.kind in ("cancel", "leave"):
            left = [client for client, task in zip(self.clients, self._asking, strict=True) if not task.done()]
            if left and event.kind == "leave":
                left[event.which % len(left)].leave(event.size)
            elif left:
                self._effect(self._cancel(left[event.which % len(left)], int(event.size)))
        else:
            getattr(self, "_" + event.kind.replace(" ", "_"))(event)

    def _ask(self, event: Event, owner: str = "") -> None:
        client = Client(self, event, owner)
        self.clients.append(client)
        self._asking.append(asyncio.ensure_future(client.ask()))

    async def _cancel(self, client: Client, after: int) -> None:
        await asyncio.sleep(after * self.setting.step_s)
        client.cancel()

    def _effect(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._effects.append(asyncio.ensure_future(coroutine))

    def _alive(self) -> list[SimulatedEngine]:
        return [engine for engine in self.engines if not engine.is_gone and engine.server is not None]

    def _engine(self, event: Event) -> SimulatedEngine | None:
        alive = self._alive()
        return alive[event.which % len(alive)] if alive else None

    def _front(self, event: Event) -> SimulatedFront:
        present = [front for front in self.fronts if not front.is_gone] or self.fronts[-1:]
        return present[event.other % len(present)]

    def _application(self, event: Event) -> Application:
        return self.applications[event.other % len(self.applications)]

    # Engines.

    async def _new_engine(self, application: Application) -> SimulatedEngine:
        while True:
            await self._head_is_back()
            engine = SimulatedEngine(self.setting, self.cluster, application)
            self.engines.append(engine)
            try:
                await _first_of(engine.start(), engine.gone)
            except (ConfigError, NotReady):  # a rival was there first, or the head is away
                engine.vanish()
                network().kill(engine.process)
                await asyncio.sleep(2.0)
            else:
                return engine

    async def _later(self, seconds: float, application: Application) -> None:
        await asyncio.sleep(seconds)
        if application.name in self.cluster.running:
            await self._new_engine(application)

    def _end(self, engine: SimulatedEngine, how: Callable[[Process], None]) -> None:
        self.num_ends += 1
        engine.vanish()
        how(engine.process)

    def _kill(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self._end(engine, network().kill)
            self._effect(self._later(event.size, engine.application))

    def _power(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self._end(engine, network().lose_power)
            self._effect(self._later(event.size, engine.application))

    def _stop(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self.num_ends += 1
            self._effect(self._stand_still(engine.process, event.size, lambda: engine.is_gone))

    async def _stand_still(self, process: Process, seconds: float, is_gone: Callable[[], bool]) -> None:
        if process.stands_still:
            return
        network().stop(process)
        await self._ended(seconds, lambda: None if is_gone() else network().go_on(process))

    def _silence(self, event: Event, to: bool = True, from_: bool = True) -> None:
        if (engine := self._engine(event)) is not None:
            self.num_ends += 1
            self._effect(self._part(engine, self._front(event), event.size, to, from_))

    def _silence_to(self, event: Event) -> None:
        self._silence(event, from_=False)

    def _silence_from(self, event: Event) -> None:
        self._silence(event, to=False)

    async def _part(
        self, engine: SimulatedEngine, front: SimulatedFront, seconds: float, to: bool, from_: bool
    ) -> None:
        if to:
            network().silence(front.process, engine.process, both=False)
        if from_:
            network().silence(engine.process, front.process, both=False)
        await self._ended(seconds, lambda: network().heal(engine.process, front.process))

    async def _ended(self, seconds: float, end: Callable[[], object]) -> None:
        """End a silence after so many seconds, or, for 0, inside of the call in which a front notices it: what has been sent
        meanwhile is then read before or after what that call has made ready."""
        if seconds:
            await asyncio.sleep(seconds)
            end()
            return
        noticed = asyncio.Event()

        def noticed_now() -> None:
            end()
            noticed.set()

        self._at_suspicion.append(noticed_now)
        with suppress(TimeoutError):
            await asyncio.wait_for(noticed.wait(), 4.0)
        if not noticed.is_set():
            self._at_suspicion.clear()
            end()

    def on_suspicion(self) -> None:
        ends, self._at_suspicion = self._at_suspicion, []
        for end in ends:
            end()

    def _island(self, event: Event) -> None:
        self._effect(self._cut_off(self._front(event), event.size))

    async def _cut_off(self, front: SimulatedFront, seconds: float) -> None:
        engines = self._alive()
        for engine in engines:
            network().silence(front.process, engine.process)
        await asyncio.sleep(seconds)
        for engine in engines:
            network().heal(front.process, engine.process)

    def _late(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            network().delay_s[engine.process, self._front(event).process] = event.size

    def _cut(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and engine.server is not None:
            self.num_ends += 1
            self.rules.disturb(engine)
            for connection in list(engine.server.sessions):
                engine.process.call(partial(connection.close, "cut"))

    def _join(self, event: Event) -> None:
        self._effect(self._later(0.0, self._application(event)))

    def _drain(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and not engine.is_ending and not engine.process.stands_still:
            engine.is_ending = True
            self._effect(self._drained(engine, event.size))

    async def _drained(self, engine: SimulatedEngine, seconds: float) -> None:
        """By an operator, who ends its node then."""
        await _first_of(engine.process.run(engine.engine.drain(engine.service.engine_id)), engine.gone)
        if not engine.is_gone:
            self._end(engine, network().lose_power)
        await self._later(seconds, engine.application)

    # Ranks.

    def _rank(self, event: Event) -> None:
        for process, groups in self._ranks(event):
            self.num_ends += 1
            process.call(partial(_fail, groups))

    def _rank_hangs(self, event: Event) -> None:
        for process, groups in self._ranks(event):
            self.num_ends += 1
            self._effect(self._hang(process, groups, event.size))

    async def _hang(self, process: Process, groups: Any, seconds: float) -> None:
        group = groups.made[-1]
        group.go.clear()
        await asyncio.sleep(seconds)
        group.go.set()
        process.call(partial(_fail, groups))

    def _no_new_ranks(self, event: Event) -> None:
        for process, groups in self._ranks(event):
            self.num_ends += 1
            self._effect(self._unstartable(process, groups, event.size))

    async def _unstartable(self, process: Process, groups: Any, seconds: float) -> None:
        make = groups.make

        def broken() -> Any:
            group = make()
            group.start_error = RankFailure("rank 0 did not start", rank=0)
            return group

        groups.make = broken
        process.call(partial(_fail, groups))
        await asyncio.sleep(seconds)
        groups.make = make

    def _slow_ranks(self, event: Event) -> None:
        for _, groups in self._ranks(event):
            self._effect(self._slowed(groups.made[-1], event.size))

    async def _slowed(self, group: Any, seconds: float) -> None:
        group.step_s = 5 * self.setting.step_s
        await asyncio.sleep(seconds)
        group.step_s = self.setting.step_s

    def _fewer_ranks(self, event: Event) -> None:
        for process, groups in self._ranks(event):
            self.num_ends += 1
            for engine in self.engines:
                if engine.process is process:
                    engine.application.has_updated = True  # fewer ranks compute other bits
            self._effect(self._shrunk(process, groups, event.size))

    async def _shrunk(self, process: Process, groups: Any, seconds: float) -> None:
        everything = groups.bundles_opened[0]
        groups.room = lambda: everything[:1]
        process.call(partial(_fail, groups))
        await asyncio.sleep(seconds)
        groups.room = None

    def _ranks(self, event: Event) -> Iterator[tuple[Process, Any]]:
        """Of one engine that serves."""
        if self.setting.form == "fleet":
            found = self._engine(event)
            if found is not None and found.serves:
                yield found.process, found.groups
        elif (own := self.fronts_with_ranks()) and (front := own[event.which % len(own)]).engine.readiness().ready:
            yield front.process, front.groups

    # Updates.

    def _update(self, event: Event) -> None:
        application = self._application(event)
        if self._begins_change(application):
            release = application.release
            kind = event.which % 5
            if kind == 0:
                release = replace(release, weights=max(self._weights[application]) + 1)
            elif kind == 1:
                release = replace(release, template=release.template + 1)
            elif kind == 2:
                release = replace(release, tokenizer=release.tokenizer + 1)
            else:
                release = replace(release, defaults="greedy" if release.defaults == "builtin" else "builtin")
            self._effect(self._updated(application, release, event.size))

    def _begins_change(self, application: Application) -> bool:
        """Whether the application does not change already."""
        if application.is_changing or application.name not in self.cluster.running:
            return False
        application.is_changing = True
        return True

    def _release(self, application: Application, release: Release) -> None:
        application.release = release
        self._weights[application].append(release.weights)
        self.cluster.args[application.name] = application.args(self.setting)

    async def _updated(self, application: Application, release: Release, after_s: float) -> None:
        """after_s: until each successor starts; 0: before, in room of its own."""
        application.has_updated = True
        self._release(application, release)
        for engine in [each for each in self._alive() if each.application is application]:
            if engine.is_gone or engine.process.stands_still or engine.is_ending:
                continue
            if not after_s:
                await self._later(0.0, application)
            engine.is_ending = True
            await _first_of(engine.process.run(engine.engine.end()), engine.gone)
            if not engine.is_gone:
                engine.vanish()
            if after_s:
                await self._later(after_s, application)
        application.is_changing = False

    def _bad_update(self, event: Event) -> None:
        application = self._application(event)
        if self._begins_change(application):
            self._effect(self._failed_update(application, event.which % 3))

    async def _failed_update(self, application: Application, kind: int) -> None:
        """Each engine of the new release dies; then the operator takes it back."""
        former, application.has_updated = application.release, application.has_updated or kind in (1, 2)
        weights = max(self._weights[application]) + 1 if kind == 1 else former.weights
        tokenizer = former.tokenizer + 1 if kind == 2 else former.tokenizer
        bad = replace(former, weights=weights, tokenizer=tokenizer, template=former.template + 1)
        self._release(application, bad)
        for _ in range(3):
            engine = await self._new_engine(application)
            await asyncio.sleep(0.3)
            if not engine.is_gone:
                self._end(engine, network().kill)
            await asyncio.sleep(0.5)
        self._release(application, former)
        application.is_changing = False

    def _remove(self, event: Event) -> None:
        application = self._application(event)
        if self._begins_change(application):
            self._effect(self._removed(application, event.size))

    async def _removed(self, application: Application, seconds: float) -> None:
        args = self.cluster.args.pop(application.name)
        self.cluster.running.discard(application.name)
        engines = [each for each in self._alive() if each.application is application and not each.is_ending]
        for engine in engines:
            engine.is_ending = True
        await asyncio.gather(*(_first_of(engine.process.run(engine.engine.end()), engine.gone) for engine in engines))
        for engine in engines:
            if not engine.is_gone:
                engine.vanish()
        await asyncio.sleep(seconds)
        self.cluster.args[application.name] = args
        self.cluster.running.add(application.name)
        for _ in range(max(1, len(engines))):
            await self._new_engine(application)
        application.is_changing = False

    def _rival(self, event: Event) -> None:
        application = self._application(event)
        if self._begins_change(application):
            self._effect(self._refused(application))

    async def _refused(self, application: Application) -> None:
        """Another application gives the same model other weights."""
        await self._head_is_back()
        rival, application.has_had_rivals = Rival(application), True
        self.cluster.running.add(rival.name)
        engine = SimulatedEngine(self.setting, self.cluster, rival)
        self.engines.append(engine)
        try:
            await engine.start()
        except LlamaError:
            pass
        else:
            if any(self.serves(front, application) for front in self.open_fronts()):
                raise Wrong("another application with the name of a model that is served, and other weights, is taken")
        self.cluster.running.discard(rival.name)
        self._end(engine, network().kill)
        application.is_changing = False

    def _adapter(self, event: Event) -> None:
        self._effect(self._loaded(event))

    async def _loaded(self, event: Event) -> None:
        application, front = self._application(event), self._front(event)
        name = f"{application.model}-{self.adapter_names[event.which % 2]}"
        folder = ADAPTERS[event.which % len(ADAPTERS)]
        await self._by_admin(front, lambda loader: loader.load(name, folder, application.model, replaces=True))

    def _no_adapter(self, event: Event) -> None:
        application = self._application(event)
        name = f"{application.model}-{self.adapter_names[event.which % 2]}"
        front = self._front(event)
        self._effect(self._by_admin(front, lambda loader: loader.unload(name, application.model)))

    async def _by_admin(self, front: SimulatedFront, call: Callable[[AdapterLoader], Coroutine[Any, Any, Any]]) -> None:
        loader = AdapterLoader(front.service, Member(self.cluster, "llama"), ENGINE)
        with suppress(LlamaError):
            await _first_of(front.process.run(call(loader)), front.ended)

    def _defaults(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and engine.serves:
            defaults = ("builtin", "greedy")[event.which % 2]
            engine.process.call(lambda: engine.engine.reconfigure({"sampling_defaults": defaults}))

    def _head(self, event: Event) -> None:
        self._effect(self._away(event.size))

    async def _away(self, seconds: float) -> None:
        self.cluster.is_away = True
        await asyncio.sleep(seconds)
        self.cluster.is_away = False

    # Fronts.

    async def _head_is_back(self) -> None:
        """Serve starts no replica while its controller is away."""
        while self.cluster.is_away:  # noqa: ASYNC110
            await asyncio.sleep(0.5)

    async def _new_front(self) -> None:
        await self._head_is_back()
        if self.setting.form == "fleet":
            front: SimulatedFront = FleetFront(self.setting, self.cluster)
        else:
            front = OwnRanks(self.setting, self.cluster, self.applications[0])
        self.fronts.append(front)
        await _first_of(front.ready(), front.ended)
        front.is_open = True

    def _pause_of_a_front(self, event: Event) -> None:
        front = self._front(event)
        self._effect(self._stand_still(front.process, event.size, lambda: front.is_gone))

    def _end_of_a_front(self, event: Event, how: Callable[[Process], None] | None = None) -> None:
        front = self._front(event)
        if sum(not each.is_gone for each in self.fronts) == 1:
            return
        front.is_gone = True
        (how or network().kill)(front.process)
        front.vanish()
        self._effect(self._front_later(event.size))

    def _power_of_a_front(self, event: Event) -> None:
        self._end_of_a_front(event, network().lose_power)

    async def _front_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._new_front()

    def _drain_of_a_front(self, event: Event) -> None:
        front = self._front(event)
        if not front.is_draining and not front.process.stands_still:
            front.is_draining = True
            self._effect(self._replaced(front))

    async def _replaced(self, front: SimulatedFront) -> None:
        await self._new_front()
        await _first_of(front.drain(), front.ended)
        if not front.is_gone:
            front.is_gone = True
            front.vanish()


async def _first_of(doing: Awaitable[Any], ends: asyncio.Event) -> None:
    """Do this in a process, which may be killed meanwhile."""
    running, ending = asyncio.ensure_future(doing), asyncio.ensure_future(ends.wait())
    await asyncio.wait((running, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if running.done():
        running.result()
    else:
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class Rival(Application):
    """Another application with the model of one."""

    def __init__(self, of: Application) -> None:
        super().__init__(of.number, Release(weights=99))

    @property
    def name(self) -> str:
        return f"rival-{self.number}"


def _fail(groups: Any) -> None:
    group = groups.made[-1]
    if not group._failed.done():
        group._failed.set_result(RankFailure("rank 1 died", rank=1))


@contextmanager
def deterministic(seed: int, loop: VirtualLoop) -> Iterator[None]:
    """Ids, keys and the date come from the seed and the loop. What every process would compute anew, and takes milliseconds, is
    computed once: a key for TLS, the tokenizer, the texts of a model."""
    draw = random.Random(seed)
    with ExitStack() as patches:
        for module, name, value in (
            (uuid, "uuid4", lambda: uuid.UUID(int=draw.getrandbits(128), version=4)),
            (secrets, "token_bytes", lambda count=32: draw.randbytes(count)),
            (secrets, "randbits", draw.getrandbits),
            (front_server, "make_group_key", _key),
            (front_server, "tls_context", lambda *_: None),
            (front_server, "TlsListener", listener),
            (service, "load_tokenizer", _tokenizer),
            (fleet, "unpack", _text),
            (time, "time", lambda: 1_700_000_000.0 + loop.time() * 86_400 / DAY_S),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


_key = cache(tls.make_group_key)
_tokenizer = cache(load_tokenizer)
_texts: dict[str, Any] = {}
_unpack = model_files.unpack


def _text(files: Any) -> Any:
    """Another object for each process."""
    if files.digest not in _texts:
        _texts[files.digest] = _unpack(files)
    return ModelText(*_texts[files.digest])


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Tell the world of calls inside of the product."""
    close, suspect, make_room = FrontConnection.close, EngineLink.suspect, Scheduler.make_room

    def closed(connection: FrontConnection, reason: str, level: int = logging.WARNING) -> None:
        world.rules.on_close(connection, reason)
        close(connection, reason, level)

    def suspected(link: EngineLink) -> None:
        suspect(link)
        if not link.is_lost:
            world.on_suspicion()

    def made_room(scheduler: Scheduler, lengths: Sequence[int], owner: str) -> Any:
        try:
            return make_room(scheduler, lengths, owner)
        except QueueFull as error:
            world.rules.on_refused(scheduler, lengths, owner, error.message)
            raise

    with (
        mock.patch.object(FrontConnection, "close", closed),
        mock.patch.object(EngineLink, "suspect", suspected),
        mock.patch.object(Scheduler, "make_room", made_room),
    ):
        yield


async def _end_all() -> None:
    """Of processes that were killed, or of a history that did not end."""
    network().end_faults()
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=60.0)


def finding(setting: Setting, events: Sequence[Event]) -> tuple[str, int]:
    """What does not hold in this history, "" if all does; and the number of messages that were sent."""
    _warmed_up()
    return _finding(setting, events)


@cache
def _warmed_up() -> None:
    """A process's first history draws other random numbers: modules are imported, and caches filled."""
    _finding(*drawn(1))


def _finding(setting: Setting, events: Sequence[Event]) -> tuple[str, int]:
    draw = random.Random(setting.seed)
    loop = VirtualLoop(lambda: draw.random() < 0.5)

    async def lived() -> None:
        world = World(setting)
        try:
            with watched(world):
                await world.run(events)
        finally:
            await world.end()

    found, log = "", Log()
    loggers = [logging.getLogger(name) for name in ("deployments", "llama_core", "cluster")]
    with deterministic(setting.seed, loop):
        for logger in loggers:
            logger.addHandler(log)
        try:
            loop.run_until_complete(lived())
        except Exception as error:
            found = f"{type(error).__name__}: {error}" + ("" if isinstance(error, Wrong) else f"\n{where(error)}")
        finally:
            for logger in loggers:
                logger.removeHandler(log)
            loop.run_until_complete(_end_all())
            loop.close()
    return found or "; ".join([*loop.errors, *log.unexpected]), next(loop.network._count)
