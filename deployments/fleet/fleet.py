"""All models of a front as one engine: the HTTP layer asks it for the engine of a request's model.

Where a request names no model, and for what concerns no model, the first one by name is meant, so that all fronts agree.
"""

import asyncio
import logging
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import cast

from cluster.driver.group_info import GroupInfo
from cluster.driver.stragglers import StepWindow
from cluster.wire.messages import WireError
from deployments.engine.callers import Callers
from deployments.engine.interface import (
    FLEET_EVENTS,
    Engine,
    EngineState,
    EngineSummary,
    Readiness,
)
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.step_report import StepStats
from deployments.engine.supervisor import Replacement
from deployments.fleet.cluster import Sleeping
from deployments.fleet.served_model import ASLEEP, ServedModel
from deployments.fleet.sleeping import SleepingModels
from deployments.links.affinity import PrefixIndex
from deployments.links.engine_link import EngineLink
from deployments.links.invitation import Invitation
from deployments.links.link import Link
from deployments.links.messages import works_with
from deployments.links.model_files import unpack
from llama_core.errors import NotReady
from llama_core.text.model_text import ModelText

log = logging.getLogger(__name__)


async def _no_engine(application: str) -> Invitation:
    raise NotReady(f"nothing starts an engine of {application}")


class Fleet:
    """Implements `Engine`, and `TracedEngine` without facts of ranks. `meet` each engine that invites this front."""

    info: GroupInfo | None = None
    step_window = StepWindow()
    replacements: Sequence[Replacement] = ()

    def __init__(
        self,
        node: str,
        callers: Callers,
        hold_timeout_s: float,
        drain_timeout_s: float = 60.0,
        on_step: Callable[[StepStats], None] = lambda stats: None,
        on_end: Callable[[MeasuredStream], None] = lambda stream: None,
        routing: str = "expected_time",
        invite: Callable[[str], Awaitable[Invitation]] = _no_engine,
    ) -> None:
        """node: Ray's id of this node. on_step, on_end: for metrics. routing: one of `routing.POLICIES`. invite: as of
        `Cluster`."""
        self._node, self._callers, self._hold_timeout_s = node, callers, hold_timeout_s
        self._on_step, self._on_end, self._routing = on_step, on_end, routing
        self._models: dict[str, ServedModel] = {}
        self._met: dict[str, EngineLink] = {}  # by the engine's id
        self._refused: set[str] = set()  # engines for which the log has the reason
        self._deployed: dict[str, Invitation] = {}  # the latest of each application
        self._refusals: dict[str, EngineSummary] = {}  # of applications that give a model's name to other weights
        self.searched = asyncio.Event()  # this front has met the engines that ran when it started; the caller sets it
        self.unserved = asyncio.Event()  # a model has lost its last engine; the caller clears it
        self._texts: dict[str, ModelText] = {}  # by the digest of their files, the latest last
        self._reading = asyncio.Lock()
        self._prefixes = PrefixIndex()
        self._events = dict.fromkeys(FLEET_EVENTS, 0)
        self._meetings: set[asyncio.Task[None]] = set()
        self._drain_timeout_s, self._draining = drain_timeout_s, False
        self._sleeping = SleepingModels(invite, self.meet)

    async def meet(self, invitation: Invitation) -> str:
        """Connect to an engine, unless this front is connected to it. Logs why it cannot. Returns why the engine is refused, or
        an empty text."""
        known = self._met.get(invitation.engine)
        if known is not None and not known.is_lost:
            return ""
        if refusal := self._refusal(invitation):
            return refusal
        link = self._met[invitation.engine] = EngineLink(invitation, self._prefixes)
        try:
            text = await self._greeted(link)
        except BaseException as error:
            self._part(link)
            link.close()
            if not isinstance(error, Exception):
                raise
            reason = str(error) or type(error).__name__
            self._log_once(invitation, f"no connection with engine {link.name} of {invitation.model}: {reason}")
            return ""
        self._refused.discard(invitation.engine)
        model = self._models.get(invitation.model)
        if model is None:
            tells = self._events, self._on_lost, partial(self._on_unserved, invitation.model)
            own = invitation.model, self._callers, self._on_step, self._on_end
            model = self._models[invitation.model] = ServedModel(*own, self._hold_timeout_s, *tells, self._routing)
        log.info("connected with engine %s of %s", link.name, invitation.model)
        model.has_application = bool(invitation.application)
        model.add(link, text)
        self._sleeping.arrived(invitation.model)
        await self._forget_unused()
        return ""

    def _refusal(self, invitation: Invitation) -> str:
        """Why this engine is refused; an empty text if it is not. An application may update its own weights."""
        name, model = invitation.application, invitation.model
        same = {each.application: each for each in self._deployed.values() if each.model == model}
        rivals = [each.application for each in same.values() if each.weights != invitation.weights]
        if not name or name in same or not rivals:
            self._deployed |= {name: invitation} if name else {}
            self._refusals.pop(name, None)
            return ""
        self._refusals[name] = EngineSummary(invitation.engine, model, invitation.host, "refused", 0, 0, 0)
        text = f"the application {name!r} is refused: {rivals[0]!r} has other weights for {model!r}; change a model_id"
        self._log_once(invitation, text)
        return text

    def _log_once(self, invitation: Invitation, text: str) -> None:
        """An engine is tried every few seconds."""
        log.log(logging.DEBUG if invitation.engine in self._refused else logging.WARNING, text)
        self._refused.add(invitation.engine)

    def _part(self, link: EngineLink) -> None:
        if self._met.get(link.invitation.engine) is link:  # else it has been met again
            del self._met[link.invitation.engine]

    async def keep(self, applications: Set[str], asleep: Mapping[str, Sleeping] | None = None) -> None:
        """applications: all that Serve has and does not remove. A model of none of them is served no more. asleep: as of
        `Cluster`."""
        if asleep is None:
            asleep = {name: each for name, each in self._sleeping.asleep.items() if each.application in applications}
        self._sleeping.asleep = asleep
        for name, application in self._sleeping.awaited.items():
            if application not in applications:
                self._sleeping.fail(name, NotReady(f"the application of {name} has been removed"))
        self._deployed = {name: each for name, each in self._deployed.items() if name in applications}
        self._refusals = {name: each for name, each in self._refusals.items() if name in applications}
        deployed = {each.model for each in self._deployed.values()}
        for model in self._models.values():
            is_used = any(
                link.takes_requests or not cast(EngineLink, link).invitation.application for link in model.links
            )
            if model.has_application and not is_used and model.model_id not in deployed:
                model.remove()
        for name, model in self._models.items():
            model.sleeps = name in asleep
        for name in (*self._sleeping.awaited, *(name for name, model in self._models.items() if model.lacks_engine)):
            self._sleeping.wake(name, self._hold_timeout_s)
        await self._forget_unused()

    def limit(self, hold_timeout_s: float, drain_timeout_s: float) -> None:
        """Change these times for all streams."""
        self._hold_timeout_s, self._drain_timeout_s = hold_timeout_s, drain_timeout_s
        for model in self._models.values():
            model.hold_timeout_s = hold_timeout_s

    async def _forget_unused(self) -> None:
        """Models that are served no more, and texts that no engine has."""
        for name, model in list(self._models.items()):
            if not model.is_served:
                del self._models[name]
                self._deployed = {app: each for app, each in self._deployed.items() if each.model != name}
                await model.stop()
        used = [link.text for model in self._models.values() for link in model.links]
        self._texts = {digest: text for digest, text in self._texts.items() if text in used}

    async def _greeted(self, link: EngineLink) -> ModelText:
        """The text of the engine's model. Raises OSError, WireError, TimeoutError or LlamaError."""
        known = self._texts  # `_forget_unused` puts another one in its place
        welcome = await link.connect(self._node, list(known))
        if not works_with(welcome.protocol):
            raise WireError(f"its protocol is {welcome.protocol}: update engines and fronts one version at a time")
        async with self._reading:
            if (files := welcome.files) is not None and welcome.files_digest not in self._texts:
                self._texts[welcome.files_digest] = await asyncio.to_thread(unpack, files)
        link.tokenizer_digest = welcome.tokenizer_digest
        return (known | self._texts)[welcome.files_digest]

    def _on_lost(self, link: Link) -> None:
        assert isinstance(link, EngineLink)
        if link.is_leaving:
            self._part(link)
        else:
            meeting = asyncio.get_running_loop().create_task(self._meet_again(link.invitation))
            self._meetings.add(meeting)
            meeting.add_done_callback(self._meetings.discard)

    def _on_unserved(self, model: str) -> None:
        self.unserved.set()
        if model in self._models and self._models[model].lacks_engine:
            self._sleeping.wake(model, self._hold_timeout_s)

    async def _meet_again(self, invitation: Invitation) -> None:
        """A connection may have ended without its engine."""
        for pause_s in (0, 1, 2, 4):
            await asyncio.sleep(pause_s)
            await self.meet(invitation)
            if invitation.engine in self._met:
                return

    @property
    def _served(self) -> list[ServedModel]:
        """Those with an engine, or all, but for removed ones; by name."""
        models = [model for _, model in sorted(self._models.items()) if not model.is_removed]
        return [model for model in models if model.is_served] or models

    @property
    def models(self) -> Mapping[str, Engine]:
        models = {model.model_id: model.models for model in self._served}
        bases = {name: adapters[name] for name, adapters in models.items()}
        # An adapter cannot take the name of a model. The first of these maps that has a name decides.
        return ChainMap(bases, *(cast(dict[str, Engine], adapters) for adapters in reversed(models.values())))

    @property
    def asleep(self) -> Set[str]:
        known, asleep = self._models, () if self._draining else self._sleeping.asleep
        return {name for name in asleep if name not in known or known[name].readiness() is ASLEEP}

    async def meet_model(self, model: str | None) -> None:
        if not self._sleeping.asleep or model in self.models:
            return
        base = self._sleeping.model_of(self.model_id if model is None else model)
        if base and base not in self._models:
            await self._sleeping.arrival(base, self._hold_timeout_s)

    @property
    def _first(self) -> ServedModel:
        """Raises NotReady before the first engine has been met."""
        if not (served := self._served):
            raise self.readiness().not_ready()
        return served[0]

    @property
    def model_id(self) -> str:
        names = {model.model_id for model in self._served} | self.asleep
        return min(names) if names else self._first.model_id

    def readiness(self) -> Readiness:
        """Of the model that is the most ready."""
        states = [model.readiness() for model in self._served]
        if self.asleep:
            states.append(ASLEEP)
        best = max(states, key=lambda state: (state.phase == "ready", state.ready, state.takes_requests), default=None)
        return best or Readiness(False, "loading", "no engine is connected")

    def live(self) -> bool:
        return True

    def check_capacity(self, owner: str = "") -> None:
        """Of one model where there is one; several are checked when a request has named its model."""
        if len(self._served) == 1 and not self.asleep:
            self._first.check_capacity(owner)
        elif not (readiness := self.readiness()).takes_requests:
            raise readiness.not_ready()

    def abort(self, request_id: str) -> bool:
        return sum(model.abort(request_id) for model in self._models.values()) > 0

    def describe(self) -> EngineState:
        """Of the first model, with the engines of all, and one of each application that is refused."""
        states = [model.describe() for model in self._served] or [EngineState()]
        engines = [engine for state in states for engine in state.engines]
        streams = [stream for state in states for stream in state.streams]
        return replace(states[0], engines=(*engines, *self._refusals.values()), streams=tuple(streams))

    async def drain(self) -> None:
        self._draining = True
        await asyncio.gather(*(model.drain(self._drain_timeout_s) for model in self._models.values()))

    async def stop(self) -> None:
        self._sleeping.stop()
        for meeting in self._meetings:
            meeting.cancel()
        for model in self._models.values():
            await model.stop()
