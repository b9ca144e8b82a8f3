"""The fronts, engines and clients of one history, in a virtual loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from deployments.replicas.front_process import MAX_SEARCH_S
from llama_core.errors import ConfigError, NotReady
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.conftest import GOLDEN
from tests.simulation.clients import LATE_S, Client
from tests.simulation.expected_answers import Origin, Wrong
from tests.simulation.history import LASTS_S, Event, Setting
from tests.simulation.processes import OWNERS, Application, FleetFront, OwnRanks, SimulatedEngine, SimulatedFront
from tests.simulation.rules import LOOK_S, Rules
from tests.support.fake_cluster import FakeCluster
from tests.support.virtual_loop import network
from tests.support.virtual_network import Process

QUIET_S: Final = 240.0  # after the last fault, for everything to end
CHANGES: Final = ("defaults", "update", "bad update", "adapter", "no adapter", "fewer ranks", "remove", "rival")


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.cluster = FakeCluster()
        self.applications = [Application(number) for number in range(setting.num_applications)]
        self.tokenizer: Tokenizer = load_tokenizer(GOLDEN / "mp2" / "tokenizer.model", None)
        self.adapter_names: Sequence[str] = ("a", "b", "c") if setting.form == "fleet" else ()
        self.fronts: list[SimulatedFront] = []
        self.engines: list[SimulatedEngine] = []
        self.clients: list[Client] = []
        self.rules = Rules(self)
        self.changes: set[str] = set()  # kinds of events that have changed what an answer is computed from
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
            await asyncio.sleep(0.17)  # their beats come at different times
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
        if left := [(client.name, client.model, client.num_tokens) for client in self._asked()]:
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
            self.changes.add(event.kind)
        if event.kind == "request":
            self._ask(event)
        elif event.kind.startswith("burst"):
            share, least = (1.0, 60) if event.kind == "burst of adapters" else (None, 10)
            for number in range(int(event.size)):
                one = replace(event, which=event.which * 1000 + number, size=least + 3 * number % (2 * least))
                self._ask(one, OWNERS[event.which % len(OWNERS)], share)
        elif event.kind in ("cancel", "leave"):
            left = self._asked()
            if left and event.kind == "leave":
                left[event.which % len(left)].leave(event.size)
            elif left:
                self._effect(self._cancel(left[event.which % len(left)], int(event.size)))
        else:
            getattr(self, "_" + event.kind.replace(" ", "_"))(event)

    def _asked(self) -> list[Client]:
        """The clients that have no whole answer yet."""
        return [client for client, task in zip(self.clients, self._asking, strict=True) if not task.done()]

    def _ask(self, event: Event, owner: str = "", adapter_share: float | None = None) -> None:
        client = Client(self, event, owner, adapter_share)
        self.clients.append(client)
        self._asking.append(asyncio.ensure_future(client.ask()))

    async def _cancel(self, client: Client, after: int) -> None:
        await asyncio.sleep(after * self.setting.step_s)
        client.cancel()

    def _effect(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._effects.append(asyncio.ensure_future(coroutine))

    def _alive(self) -> list[SimulatedEngine]:
        return [engine for engine in self.engines if not engine.is_gone and engine.server is not None]

    def _engines_of(self, application: Application) -> list[SimulatedEngine]:
        return [engine for engine in self._alive() if engine.application is application]

    def _engine(self, event: Event) -> SimulatedEngine | None:
        alive = self._alive()
        return alive[event.which % len(alive)] if alive else None

    def _front(self, event: Event) -> SimulatedFront:
        present = [front for front in self.fronts if not front.is_gone] or self.fronts[-1:]
        return present[event.other % len(present)]

    def _application(self, event: Event) -> Application:
        return self.applications[event.other % len(self.applications)]

    # Engines and fronts.

    async def _new_engine(self, application: Application) -> SimulatedEngine:
        while True:
            await self._head_is_back()
            engine = SimulatedEngine(self.setting, self.cluster, application)
            self.engines.append(engine)
            try:
                await first_of(engine.start(), engine.gone)
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
        await first_of(front.ready(), front.ended)
        front.is_open = True

    async def _stand_still(self, process: Process, seconds: float, is_gone: Callable[[], bool]) -> None:
        if process.stands_still:
            return
        network().stop(process)
        await self._ended(seconds, lambda: None if is_gone() else network().go_on(process))

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
        await first_of(front.drain(), front.ended)
        if not front.is_gone:
            front.is_gone = True
            front.vanish()


async def first_of(doing: Awaitable[Any], ends: asyncio.Event) -> None:
    """Do this in a process, which may be killed meanwhile."""
    running, ending = asyncio.ensure_future(doing), asyncio.ensure_future(ends.wait())
    await asyncio.wait((running, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if running.done():
        running.result()
    else:
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
