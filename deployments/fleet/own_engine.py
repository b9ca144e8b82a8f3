"""The model of an engine in this process, as the HTTP layer and the handle use it: one front and one engine, of `build_app`."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from deployments.args import IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.interface import FLEET_EVENTS, Engine, EngineState, Readiness
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from deployments.fleet.model_view import EngineText, ModelViews
from deployments.fleet.served_model import ServedModel
from deployments.links import messages
from deployments.links.affinity import PrefixIndex
from deployments.links.front_server import FrontServer
from deployments.links.front_session import FrontSession
from deployments.links.link import Link, RoutedStream


class LocalLink(Link):
    """A link with the engine of this process: each message is a call."""

    is_only = True

    def __init__(self, server: FrontServer) -> None:
        super().__init__(server.engine, "this process", PrefixIndex())
        self.session = LocalSession(server, self)

    def send(self, message: messages.FromFront) -> None:
        self.session.take(message)

    def close(self) -> None:
        pass


class LocalSession(FrontSession):
    outlives_engine = False

    def __init__(self, server: FrontServer, link: LocalLink) -> None:
        super().__init__(server)
        self._link = link

    def send(self, message: messages.FromEngine) -> None:
        self._link.note_heard()
        self._link.take(message)

    def close(self, reason: str, level: int = logging.WARNING) -> None:
        pass  # both end with the process


class OwnEngine(ServedModel):
    """Implements `Models`. Call `start`, later `stop`."""

    asleep: Set[str] = frozenset()

    def __init__(
        self, service: LlamaService, args: IngressArgs, on_end: Callable[[MeasuredStream], None] = lambda stream: None
    ) -> None:
        """on_end: for metrics, of ended streams."""
        super().__init__(service.model_id, Callers(args), None, on_end, 0.0, dict.fromkeys(FLEET_EVENTS, 0))
        self.service = service
        self.fronts: FrontServer | None = None

    async def start(self) -> None:
        """Start the ranks and begin to serve. Raises the error that prevented it."""
        await self.service.start()
        self.fronts = FrontServer(self.service)
        link = LocalLink(self.fronts)
        self.fronts.join(link.session)
        self.add(link, self.service.text)

    async def meet_model(self, model: str | None) -> None:
        pass

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """As of `LlamaService`."""
        self.service.reconfigure(changes)
        if self.fronts is not None:
            self.fronts.beat()

    def tell_adapters(self) -> None:
        if self.fronts is not None:
            self.fronts.tell_adapters()

    @property
    def models(self) -> Mapping[str, Engine]:
        return ModelViews(self, self.service.adapters)

    @property
    def text(self) -> EngineText:
        return EngineText(self.service.text, "", self.service.sampling_defaults)

    @property
    def latest(self) -> EngineState:
        return self._state or self.service.describe()

    async def readmit(self, streams: Sequence[SequenceStream], *, is_timed: bool = False) -> None:
        """All or none: raises QueueFull or NotReady while the streams are suspended still."""
        if left := [stream.sequence for stream in streams if not stream.ended]:
            self.check_capacity()
            self.service.loop.make_room(left[0].terms, [seq.prompt_len for seq in left])
        await super().readmit(streams, is_timed=is_timed)

    def _place(self, lives: Iterable[RoutedStream], silent_since_s: float | None = None) -> None:
        """While ranks recover, streams wait in the engine's queue, for which `readmit` has made room."""
        for live in lives:
            if not live.refused_by and any(link.takes_requests for link in self.links):
                live.is_readmitted = False
                self.links[0].take_on(live)
                self._resume(live)
            else:
                self._fail(live, self.readiness().not_ready())

    def readiness(self) -> Readiness:
        return self.service.readiness()

    def live(self) -> bool:
        return self.service.live()

    def check_capacity(self, owner: str = "") -> None:
        self.service.check_capacity(owner)

    def describe(self) -> EngineState:
        return self.service.describe()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new request, and wait up to `drain_timeout_s` for the live ones to end."""
        await self.service.drain()
        await asyncio.sleep(0)  # streams that it has aborted have their errors then

    async def stop(self) -> None:
        self._ticking.cancel()
        if self.fronts is not None:
            self.fronts.close()
        await self.service.stop()
        await asyncio.sleep(0)  # as of `drain`
        await super().stop()
