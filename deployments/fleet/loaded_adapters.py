"""LoRA adapters that are loaded while engines serve.

The cluster has their names, folders and digests. Every engine of the model keeps in step with it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from cluster.driver.ray_calls import in_passing_thread
from deployments.engine.interface import Models
from deployments.engine.service import LlamaService
from deployments.fleet.cluster import Cluster, Entry
from deployments.links.messages import Fault, error_of, fault_of
from llama_core.errors import InvalidParameter, LlamaError, NotReady
from llama_core.files.adapter import Adapter

log = logging.getLogger(__name__)

SYNC_S: Final = 5.0
RETRY_S: Final = 60.0  # before an adapter that could not be opened is opened again
KNOWN_WITHIN_S: Final = 10.0  # an engine's Welcome with the change arrives after its call has returned


class LoadedAdapters:
    """Those of one engine."""

    def __init__(self, service: LlamaService, cluster: Cluster, on_change: Callable[[], None] = lambda: None) -> None:
        self._service, self._cluster, self._on_change = service, cluster, on_change
        self._loaded: dict[str, tuple[Entry, Adapter]] = {}
        self._refused: dict[Entry, float] = {}  # until when, by time.monotonic()
        self._syncing = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def check(self, model: str, name: str, folder: str) -> str | Fault | None:
        """The adapter's digest, or why the engine cannot have it. None if the engine is of another model."""
        if model != self._service.model_id:
            return None
        try:
            if name in self._service.args.lora_adapters:
                raise InvalidParameter.of("lora_name", f"{name!r} is in lora_adapters and stays")
            adapter = await in_passing_thread(self._service.open_adapter, folder)
            self._refused.clear()  # the cause may be gone
            return adapter.digest
        except LlamaError as error:
            return fault_of(InvalidParameter(error.message, param=error.param or "lora_path"))

    async def sync(self) -> None:
        """Have the adapters that the cluster has. One whose files cannot be read, or have changed, is left out."""
        async with self._syncing:
            loaded = {}
            for name, entry in (await self._cluster.adapters(self._service.model_id)).items():
                before, adapter = self._loaded.get(name, (None, None))
                if before != entry:
                    adapter = await self._opened(name, entry)
                if adapter is not None:
                    loaded[name] = entry, adapter
            if loaded != self._loaded:
                log.info("loaded adapters: %s", ", ".join(map(repr, loaded)) or "none")
                self._loaded = loaded
                self._service.load_adapters({name: adapter for name, (_, adapter) in loaded.items()})
                self._on_change()

    async def start(self) -> None:
        """Keep in step with the cluster from now on."""
        await self.sync()
        self._keeping = asyncio.get_running_loop().create_task(self._keep_in_step())

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    async def _keep_in_step(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            try:
                await self.sync()
            except Exception as error:  # the head is away
                log.debug("the loaded adapters are unknown: %s", type(error).__name__)

    async def _opened(self, name: str, entry: Entry) -> Adapter | None:
        if time.monotonic() < self._refused.get(entry, 0.0):
            return None
        try:
            adapter = await in_passing_thread(self._service.open_adapter, entry.folder)
            if adapter.digest == entry.digest:
                return adapter
            reason = "its files have changed since it was loaded"
        except LlamaError as error:
            reason = error.message
        self._refused[entry] = time.monotonic() + RETRY_S
        log.error("the adapter %r is left out: %s", name, reason)
        return None


class AdapterCalls:
    """The Serve methods of a deployment with engines, for `AdapterLoader`."""

    adapters: LoadedAdapters

    async def check_adapter(self, model: str, name: str, folder: str) -> str | Fault | None:
        return await self.adapters.check(model, name, folder)

    async def sync_adapters(self) -> None:
        await self.adapters.sync()


class AdapterLoader:
    """Loads adapters into all engines, and unloads them, for a front or a replica of `build_app`."""

    def __init__(self, engine: Models, cluster: Cluster, deployment: str) -> None:
        """engine: that of the HTTP layer. deployment: the engines'."""
        self._engine, self._cluster, self._deployment = engine, cluster, deployment

    async def load(self, name: str, folder: str, base: str | None, *, replaces: bool) -> None:
        """Returns when this process serves the adapter. replaces: another one of the same name may be loaded. Raises
        InvalidParameter, or NotReady if no engine answers or this process does not serve it within `KNOWN_WITHIN_S`."""
        known, model = self._engine.models.get(name), self._base(base)
        if known is not None and not (replaces and known.parent == model):
            raise InvalidParameter.of("lora_name", "a model of this name is served")
        digests = set()
        for answer in await self._cluster.call_all(self._deployment, "check_adapter", model, name, folder):
            if isinstance(answer, Fault):
                raise error_of(answer)
            digests |= {answer} - {None}
        if not digests:
            raise NotReady("no engine has checked the adapter in time: try again")
        if len(digests) > 1:
            raise InvalidParameter.of("lora_path", "the nodes of the engines have different files there")
        entry = Entry(folder, digests.pop())
        if not await self._cluster.put_adapter(model, name, entry, replaces=replaces):
            raise InvalidParameter.of("lora_name", "an adapter of this name is loaded")
        if not await self._is_shown(lambda: self._digest(name) == entry.digest):
            raise NotReady(
                "the adapter is stored, but not served here yet: GET /v1/models will list it; do not load it again"
            )

    async def unload(self, name: str, base: str | None) -> bool:
        """New requests do not find the adapter; streams that use it go on. False if it has not been loaded. Raises
        InvalidParameter, or NotReady as `load`."""
        known = self._engine.models.get(name)
        model = known.parent if known is not None and known.parent and base is None else self._base(base)
        entry = (await self._cluster.adapters(model)).get(name)
        if entry is None:
            return False
        await self._cluster.remove_adapter(model, name)
        if not await self._is_shown(lambda: self._digest(name) != entry.digest):
            raise NotReady(
                "the adapter is no longer stored, but still served here: GET /v1/models will drop it within seconds"
            )
        return True

    async def _is_shown(self, condition: Callable[[], bool]) -> bool:
        """Have all engines ask the cluster. Whether this process knows of the change in time."""
        await self._cluster.call_all(self._deployment, "sync_adapters")
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True

    def _digest(self, name: str) -> str:
        known = self._engine.models.get(name)
        return "" if known is None else known.adapter

    def _base(self, base: str | None) -> str:
        """Raises InvalidParameter or NotReady."""
        if not self._engine.models:
            raise NotReady("no engine is connected")
        bases = [name for name, engine in self._engine.models.items() if engine.parent is None]
        if base is None and len(bases) == 1:
            return bases[0]
        if base not in bases:
            names = ", ".join(map(repr, bases))
            raise InvalidParameter.of("base_model_name", f"must be one of {names}")
        return base
