"""Fronts, engines and clients of one history in a virtual loop, and what must hold of them."""

import asyncio
import random
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest import mock

from cluster.wire import tls
from deployments.args import IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet import front_server
from deployments.fleet.fleet import Fleet
from deployments.fleet.remote_engine import RemoteEngine
from llama_core.errors import LlamaError, NotReady, QueueFull
from llama_core.scheduling.request import FinishReason, Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.simulation.history import LASTS_S, Event, Setting
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import arbitrary, continuation
from tests.support.fleets import NODE, FakeEngineProcess
from tests.support.virtual_loop import VirtualLoop, listener, network
from tests.support.virtual_network import Process

QUIET_S: Final = 240.0  # after the last fault, for everything to end
SEARCH_S: Final = 10.0
DRAIN_S: Final = 5.0
RETRY_S: Final = 0.5


class Wrong(Exception):
    """A rule does not hold."""


class Front:
    def __init__(self, setting: Setting) -> None:
        self.process = Process("front")
        self.fleet: Fleet = self.process.call(lambda: Fleet(NODE, Callers(IngressArgs()), setting.hold_timeout_s))
        self.is_gone = False
        self.is_draining = False
        self.ended = asyncio.Event()  # its clients' connections end


class Client:
    """Asks until it has an answer, of whichever front there is."""

    def __init__(self, world: "World", event: Event) -> None:
        self.model, self.name = world.model_of(event.other), f"request {event.at_s:g} s {event.which}"
        draw = random.Random(event.which)
        self.prompt = [1, *(3 + draw.randrange(400) for _ in range(draw.choice((3, 20, 20, 70))))]
        if draw.random() < 0.3:  # a shared beginning
            self.prompt = [1, *range(3, 40), *self.prompt[1:4]]
        self.params = SamplingParams(max_tokens=int(event.size), seed=event.which, temperature=1.0)
        self.expected = continuation(self.prompt, int(event.size), lambda tokens: arbitrary(tokens, event.which))
        self.tokens: list[int] = []
        self.stream: SequenceStream | None = None
        self.is_cancelled = False
        self._world = world

    async def ask(self) -> None:
        number = len(self.name)
        while not self.is_cancelled:
            fronts = [front for front in self._world.fronts if not (front.is_gone or front.is_draining)]
            if fronts:
                number += 1
                front = fronts[number % len(fronts)]
                if await self._is_answered(front):
                    return
            await asyncio.sleep(RETRY_S)

    async def _is_answered(self, front: Front) -> bool:
        """Whether this front has given the whole answer."""
        reading = front.process.run(self._read(front.fleet))
        leaving = asyncio.ensure_future(front.ended.wait())
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return reading.done() and reading.result()
        finally:
            leaving.cancel()
            reading.cancel()

    async def _read(self, fleet: Fleet) -> bool:
        self.tokens = []
        try:
            engine = fleet.models.get(self.model)
            if engine is None:
                return False
            (stream,) = await engine.submit(Request([self.prompt], [self.params]))
        except (NotReady, QueueFull):
            return False
        assert isinstance(stream, SequenceStream)
        self.stream = stream
        try:
            async for delta in stream:
                self.tokens += delta.tokens
                if self.tokens != self.expected[: len(self.tokens)]:
                    raise Wrong(f"{self.name}: {self.tokens} instead of {self.expected}")
                finish = delta.finish_reason
        except NotReady as error:
            if "shut down" in error.message or "removed" in error.message:
                return False
            raise Wrong(f"{self.name}: {error.message}") from None
        except LlamaError as error:
            if self.is_cancelled:
                return True
            raise Wrong(f"{self.name}: {error!r}") from None
        if not self.is_cancelled and (self.tokens != self.expected or finish is FinishReason.ABORT):
            raise Wrong(f"{self.name}: ended by {finish} with {self.tokens} instead of {self.expected}")
        return True

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.stream is not None:
            self.stream.cancel()


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.fronts: list[Front] = []
        self.engines: list[FakeEngineProcess] = []
        self.clients: list[Client] = []
        self._asking: list[asyncio.Task[None]] = []
        self._effects: list[asyncio.Task[Any]] = []

    def model_of(self, number: int) -> str:
        return f"model-{number % (max(self.setting.models) + 1)}"

    async def run(self, events: Sequence[Event]) -> None:
        for _ in range(self.setting.num_fronts):
            self._new_front()
        for model in self.setting.models:
            await self._new_engine(f"model-{model}")
        began_s = time.monotonic()
        for event in events:
            if (wait_s := began_s + event.at_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            self._happens(event)
            self._check_owners()
        await asyncio.sleep(max(0.0, began_s + LASTS_S - time.monotonic()))
        await asyncio.gather(*self._effects)
        network().delay_s.clear()
        network().heal()
        _, late = await asyncio.wait([*self._asking, asyncio.ensure_future(asyncio.sleep(0))], timeout=QUIET_S)
        clients = [client for client, task in zip(self.clients, self._asking, strict=True) if task in late]
        if clients:
            left = [(client.name, client.model, len(client.tokens)) for client in clients]
            raise Wrong(f"{QUIET_S:g} s after the last fault these wait: {left}")
        await asyncio.gather(*self._asking)
        await asyncio.sleep(3.0)
        self._check_nothing_left()

    async def end(self) -> None:
        for task in self._asking:
            task.cancel()
        network().end_faults()
        await asyncio.gather(*(front.fleet.stop() for front in self.fronts))
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    # What must hold.

    def _check_owners(self) -> None:
        for model in self._models():
            owners: dict[SequenceStream, int] = {}
            for link in model.links:
                for number, live in link.streams.items():
                    if live.link is not link or live.number != number:
                        raise Wrong("a stream is counted for an engine that does not compute it")
                    owners[live.stream] = owners.get(live.stream, 0) + 1
            if any(count > 1 for count in owners.values()):
                raise Wrong("a stream has two engines")

    def _check_nothing_left(self) -> None:
        for model in self._models():
            if model._live or model._held:
                raise Wrong(f"a front has {len(model._live)} streams left, {len(model._held)} of them held")
        for engine in self._alive():
            scheduler = engine.service.loop.scheduler
            if scheduler.num_running or scheduler.num_waiting:
                raise Wrong(f"an engine has {scheduler.num_running} and {scheduler.num_waiting} sequences left")

    def _models(self) -> Iterator[RemoteEngine]:
        for front in self.fronts:
            if not front.is_gone:
                yield from front.fleet._models.values()

    # What happens.

    def _happens(self, event: Event) -> None:
        if event.kind == "request":
            client = Client(self, event)
            self.clients.append(client)
            self._asking.append(asyncio.ensure_future(client.ask()))
        elif event.kind == "cancel":
            if self.clients:
                client = self.clients[event.which % len(self.clients)]
                self._effect(self._cancel(client, int(event.size)))
        else:
            getattr(self, "_" + event.kind.replace(" ", "_"))(event)

    async def _cancel(self, client: Client, after: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                while len(client.tokens) < after:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        client.cancel()

    def _effect(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._effects.append(asyncio.ensure_future(coroutine))

    def _alive(self) -> list[FakeEngineProcess]:
        return [engine for engine in self.engines if not engine.is_gone and engine.server is not None]

    def _engine(self, event: Event) -> FakeEngineProcess | None:
        alive = self._alive()
        return alive[event.which % len(alive)] if alive else None

    def _front(self, event: Event) -> Front:
        present = [front for front in self.fronts if not front.is_gone]
        return present[event.other % len(present)]

    def _new_front(self) -> Front:
        front = Front(self.setting)
        self.fronts.append(front)
        front.process.run(self._search(front))
        return front

    async def _search(self, front: Front) -> None:
        while not front.is_gone:
            for engine in self._alive():
                if engine.invitation is not None:
                    front.process.run(front.fleet.meet(engine.invitation))
            await asyncio.sleep(SEARCH_S)

    async def _new_engine(self, model: str) -> None:
        setting = self.setting

        def group() -> FakeGroup:
            made = FakeGroup(num_blocks=400, step_s=setting.step_s)
            made.ranks.model = arbitrary
            return made

        engine = FakeEngineProcess(
            group,
            model_id=model,
            max_seq_len=256,
            max_batch_size=setting.max_batch_size,
            max_queue=setting.max_queue,
        )
        self.engines.append(engine)
        invitation = await engine.start(NODE)
        invitation = engine.invitation = replace(invitation, application=model, weights=model)
        for front in self.fronts:
            if not front.is_gone:
                front.process.run(front.fleet.meet(invitation))

    async def _later(self, seconds: float, model: str) -> None:
        await asyncio.sleep(seconds)
        await self._new_engine(model)

    def _kill(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            engine.is_gone = True
            network().kill(engine.process)
            self._effect(self._later(event.size, engine.service.model_id))

    def _power(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            engine.is_gone = True
            network().lose_power(engine.process)
            self._effect(self._later(event.size, engine.service.model_id))

    def _stop(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            self._effect(self._stand_still(engine.process, event.size, lambda: engine.is_gone))

    async def _stand_still(self, process: Process, seconds: float, is_gone: Callable[[], bool]) -> None:
        if process.stands_still:
            return
        network().stop(process)
        await asyncio.sleep(seconds)
        if not is_gone():
            network().go_on(process)

    def _silence(self, event: Event, to: bool = True, from_: bool = True) -> None:
        if (engine := self._engine(event)) is not None:
            self._effect(self._part(engine, self._front(event), event.size, to, from_))

    def _silence_to(self, event: Event) -> None:
        self._silence(event, from_=False)

    def _silence_from(self, event: Event) -> None:
        self._silence(event, to=False)

    async def _part(self, engine: FakeEngineProcess, front: Front, seconds: float, to: bool, from_: bool) -> None:
        if to:
            network().silence(front.process, engine.process, both=False)
        if from_:
            network().silence(engine.process, front.process, both=False)
        await asyncio.sleep(seconds)
        network().heal(engine.process, front.process)

    def _late(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None:
            network().delay_s[engine.process, self._front(event).process] = event.size

    def _cut(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and engine.server is not None:
            for connection in list(engine.server.connections):
                engine.process.call(partial(connection.close, "cut"))

    def _rank(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and engine.service.readiness().ready:
            group = engine.groups.made[-1]
            if not group._failed.done():
                engine.process.call(group.fail)

    def _hand_over(self, event: Event) -> None:
        if (engine := self._engine(event)) is not None and not engine.process.stands_still:
            engine.is_gone = True
            self._effect(self._replaced(engine, event.size))

    async def _replaced(self, engine: FakeEngineProcess, after_s: float) -> None:
        """As an update: with room its successor starts first."""
        model = engine.service.model_id
        if not after_s:
            await self._new_engine(model)
        assert engine.server is not None
        await engine.process.run(engine.server.hand_over(True, DRAIN_S))
        await engine.process.run(engine.stop())
        if after_s:
            await self._later(after_s, model)

    def _join(self, event: Event) -> None:
        self._effect(self._new_engine(self.model_of(event.which)))

    def _pause_of_a_front(self, event: Event) -> None:
        front = self._front(event)
        self._effect(self._stand_still(front.process, event.size, lambda: front.is_gone))

    def _end_of_a_front(self, event: Event) -> None:
        front = self._front(event)
        front.is_gone = True
        network().kill(front.process)
        front.ended.set()
        self._effect(self._front_later(event.size))

    async def _front_later(self, seconds: float) -> None:
        if not any(not front.is_gone for front in self.fronts):
            self._new_front()
            return
        await asyncio.sleep(seconds)
        self._new_front()

    def _drain_of_a_front(self, event: Event) -> None:
        front = self._front(event)
        if not front.is_draining and not front.process.stands_still:
            front.is_draining = True
            self._new_front()
            self._effect(self._drained(front))

    async def _drained(self, front: Front) -> None:
        draining = front.process.run(front.fleet.drain())
        ending = asyncio.ensure_future(front.ended.wait())
        await asyncio.wait({draining, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if front.is_gone:  # killed meanwhile
            return
        front.is_gone = True
        front.ended.set()
        await front.process.run(front.fleet.stop())


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Ids and keys come from the seed; one key serves for all engines, because making one takes milliseconds."""
    draw = random.Random(seed)
    key = tls.make_group_key()
    with ExitStack() as patches:
        for module, name, value in (
            (uuid, "uuid4", lambda: uuid.UUID(int=draw.getrandbits(128), version=4)),
            (secrets, "token_bytes", lambda count=32: draw.randbytes(count)),
            (secrets, "randbits", draw.getrandbits),
            (front_server, "make_group_key", lambda: key),
            (front_server, "tls_context", lambda *_: None),
            (front_server, "TlsListener", listener),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def finding(setting: Setting, events: Sequence[Event]) -> tuple[str, int]:
    """What does not hold in this history, "" if all does; and the number of messages that were sent."""
    draw = random.Random(setting.seed)
    loop = VirtualLoop(lambda: draw.random() < 0.5)

    async def lived() -> None:
        world = World(setting)
        try:
            await world.run(events)
        finally:
            await world.end()

    found = ""
    with deterministic(setting.seed):
        try:
            loop.run_until_complete(lived())
        except (Wrong, AssertionError) as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            loop.close()
    return found or "; ".join(loop.errors), next(loop.network._count)
