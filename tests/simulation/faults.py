"""What happens to the processes of a simulated cluster: each kind of `history.FAULTS` is a method."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

from llama_core.errors import RankFailure
from tests.simulation.history import Event
from tests.simulation.processes import SimulatedEngine, SimulatedFront
from tests.simulation.world import World, first_of
from tests.support.virtual_loop import network
from tests.support.virtual_network import Process


class FaultyWorld(World):
    # Engines.

    def _kill(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self._end(engine, network().kill)
            self._effect(self._later(event.size, engine.application))

    def _power(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self._end(engine, network().lose_power)
            self._effect(self._later(event.size, engine.application))

    def _outage(self, event: Event) -> None:
        for engine in self._engines_of(application := self._application(event)):
            self._end(engine, network().kill)
            self._effect(self._later(event.size, application))

    def _stop(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self.num_ends += 1
            self._effect(self._stand_still(engine.process, event.size, lambda: engine.is_gone))

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
        await first_of(engine.process.run(engine.engine.drain(engine.service.engine_id)), engine.gone)
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

        if not vars(groups).get("is_broken"):  # else an earlier one, which ends by itself
            groups.is_broken, groups.make = True, broken
            process.call(partial(_fail, groups))
            await asyncio.sleep(seconds)
            groups.is_broken, groups.make = False, make

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


def _fail(groups: Any) -> None:
    group = groups.made[-1]
    if not group._failed.done():
        group._failed.set_result(RankFailure("rank 1 died", rank=1))
