"""The models of a front that have no engine because nobody uses them, and the calls that start one.

A call by handle to an application without replicas waits in Serve, which starts one for it at once.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from deployments.fleet.cluster import Sleeping
from deployments.links.invitation import Invitation
from llama_core.errors import NotReady, QueueFull

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1024  # requests for a model that this front has never had; other models have limits of their own


class SleepingModels:
    """asleep: by model, as Serve says. One call a model waits at a time, however many requests do."""

    def __init__(
        self, invite: Callable[[str], Awaitable[Invitation]], meet: Callable[[Invitation], Awaitable[str]]
    ) -> None:
        """invite: an engine of an application, which starts if need be. meet: connect with it."""
        self._invite, self._meet = invite, meet
        self.asleep: Mapping[str, Sleeping] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}  # by model
        # Of the first engine of a model that requests wait for, with the model's application.
        self._arrivals: dict[str, tuple[str, asyncio.Future[None]]] = {}
        self._num_waiting = Counter[str]()

    @property
    def awaited(self) -> Mapping[str, str]:
        """Models that requests wait for before they can be planned, and their applications."""
        return {model: application for model, (application, _) in self._arrivals.items()}

    def model_of(self, name: str) -> str:
        """The model, or the one that has the adapter; an empty text for others."""
        return next((model for model, each in self.asleep.items() if name == model or name in each.adapters), "")

    def wake(self, model: str, timeout_s: float) -> None:
        """Start an engine, unless a call for one waits. timeout_s: how long this one may."""
        if model in self.asleep and model not in self._calls:
            call = self._calls[model] = asyncio.create_task(self._call(model, timeout_s))
            call.add_done_callback(lambda ended: self._calls.pop(model, None))

    async def _call(self, model: str, timeout_s: float) -> None:
        log.info("%s sleeps: an engine is asked for", model)
        try:
            async with asyncio.timeout(timeout_s):
                invitation = await self._invite(self.asleep[model].application)
            if refusal := await self._meet(invitation):
                self.fail(model, NotReady(refusal))
        except Exception as error:  # the next search asks again
            log.warning("no engine of %s has started: %s; it is asked for again", model, type(error).__name__)

    async def arrival(self, model: str, timeout_s: float) -> None:
        """Start an engine, and wait for it. Raises NotReady or QueueFull."""
        if self._num_waiting[model] >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} requests wait for an engine of {model} already", retry_after_s=2.0)
        new = self.asleep[model].application, asyncio.get_running_loop().create_future()
        _, arrival = self._arrivals.setdefault(model, new)
        self.wake(model, timeout_s)
        self._num_waiting[model] += 1
        try:
            await asyncio.wait_for(asyncio.shield(arrival), timeout_s)
        except TimeoutError:
            raise NotReady(f"no engine of {model} started within {timeout_s:g} s (hold_timeout_s)") from None
        finally:
            self._num_waiting[model] -= 1
            if not self._num_waiting[model]:
                self._arrivals.pop(model, None)

    def arrived(self, model: str) -> None:
        if model in self._arrivals:
            self._arrivals.pop(model)[1].set_result(None)

    def fail(self, model: str, error: NotReady) -> None:
        """End the requests that wait for this model's first engine."""
        if model in self._arrivals:
            _, arrival = self._arrivals.pop(model)
            arrival.set_exception(error)
            arrival.exception()  # read, also where nobody waits any more

    def stop(self) -> None:
        for call in list(self._calls.values()):
            call.cancel()
