"""What operators do to a simulated cluster: updates, applications that come and go, adapters, defaults."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from deployments.fleet.cluster import ENGINE
from deployments.fleet.loaded_adapters import AdapterLoader
from llama_core.errors import LlamaError
from tests.simulation.expected_answers import Wrong
from tests.simulation.faults import FaultyWorld
from tests.simulation.history import Event
from tests.simulation.processes import ADAPTERS, Application, Release, SimulatedEngine, SimulatedFront
from tests.simulation.world import first_of
from tests.support.fake_cluster import Member
from tests.support.virtual_loop import network


class OperatedWorld(FaultyWorld):
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
            self._effect(self._updated(application, release, event))

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

    async def _updated(self, application: Application, release: Release, event: Event) -> None:
        """event.size: seconds until each successor starts; 0: before, in room of its own. Some updates follow the end of an
        adapter."""
        application.has_updated, after_s = True, event.size
        if event.other % 2 and (used := [each.model for each in self._asked() if each.adapter]):
            await self._by_admin(self._front(event), lambda loader: loader.unload(used[0], None))
        self._release(application, release)
        for engine in self._engines_of(application):
            if engine.is_gone or engine.process.stands_still or engine.is_ending:
                continue
            if not after_s:
                await self._later(0.0, application)
            engine.is_ending = True
            await first_of(engine.process.run(engine.engine.end()), engine.gone)
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
        engines = [each for each in self._engines_of(application) if not each.is_ending]
        for engine in engines:
            engine.is_ending = True
        await asyncio.gather(*(first_of(engine.process.run(engine.engine.end()), engine.gone) for engine in engines))
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
        name = f"{application.model}-{self.adapter_names[event.which % 3]}"
        folder = ADAPTERS[event.which // 3 % len(ADAPTERS)]
        await self._by_admin(front, lambda loader: loader.load(name, folder, application.model, replaces=True))

    def _no_adapter(self, event: Event) -> None:
        application = self._application(event)
        name = f"{application.model}-{self.adapter_names[event.which % 3]}"
        front = self._front(event)
        self._effect(self._by_admin(front, lambda loader: loader.unload(name, application.model)))

    async def _by_admin(self, front: SimulatedFront, call: Callable[[AdapterLoader], Coroutine[Any, Any, Any]]) -> None:
        loader = AdapterLoader(front.service, Member(self.cluster, "llama"), ENGINE)
        with suppress(LlamaError):
            await first_of(front.process.run(call(loader)), front.ended)

    def _defaults(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and engine.serves:
            defaults = ("builtin", "greedy")[event.which % 2]
            engine.process.call(lambda: engine.engine.reconfigure({"sampling_defaults": defaults}))

    def _limits(self, event: Event) -> None:
        """As Serve changes `user_config` of all engines."""
        application = self._application(event)
        application.max_queue = (2, self.setting.max_queue)[event.which % 2]
        for engine in self._engines_of(application):
            if engine.serves:
                engine.process.call(partial(engine.engine.reconfigure, {"max_queue": application.max_queue}))

    def _head(self, event: Event) -> None:
        self._effect(self._away(event.size))

    async def _away(self, seconds: float) -> None:
        self.cluster.is_away = True
        await asyncio.sleep(seconds)
        self.cluster.is_away = False


class Rival(Application):
    """Another application with the model of one."""

    def __init__(self, of: Application) -> None:
        super().__init__(of.number, Release(weights=99))

    @property
    def name(self) -> str:
        return f"rival-{self.number}"
