"""LoRA adapters that are loaded while engines serve.

Ray's key-value store has their names, folders and digests. Every engine of the model keeps in step with the store, so a loaded
adapter survives engines, fronts and, where the head's state is in Redis, the head.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec
from ray.experimental import internal_kv

from cluster.driver.ray_calls import in_passing_thread
from deployments.engine.adapter_model import AdapterModel
from deployments.engine.interface import Engine
from deployments.engine.service import LlamaService
from deployments.fleet.directory import call_all
from deployments.fleet.messages import Fault, error_of, fault_of
from llama_core.errors import InvalidParameter, LlamaError, NotReady
from llama_core.files.adapter import Adapter

log = logging.getLogger(__name__)

SYNC_S: Final = 2.0
KNOWN_WITHIN_S: Final = 10.0  # a front hears of an engine's adapters by their connection
_NAMESPACE: Final = b"llama-ray-adapters"


class Entry(msgspec.Struct, frozen=True):
    """An adapter in the store. folder: as the caller gave it. digest: of its files when it was loaded."""

    folder: str
    digest: str


def stored(model: str) -> dict[str, Entry]:
    """By name. Blocks."""
    found = {}
    for key in internal_kv._internal_kv_list(_key(model, ""), namespace=_NAMESPACE):
        if value := internal_kv._internal_kv_get(key, namespace=_NAMESPACE):  # else another one has just removed it
            found[key.partition(b"\0")[2].decode()] = msgspec.json.decode(value, type=Entry)
    return found


def store(model: str, name: str, entry: Entry | None) -> None:
    """entry: None to remove it. Blocks."""
    if entry is None:
        internal_kv._internal_kv_del(_key(model, name), namespace=_NAMESPACE)
    else:
        internal_kv._internal_kv_put(_key(model, name), msgspec.json.encode(entry), namespace=_NAMESPACE)


def _key(model: str, name: str) -> bytes:
    return f"{model}\0{name}".encode()


class LoadedAdapters:
    """Those of one engine."""

    def __init__(self, service: LlamaService, on_change: Callable[[], None] = lambda: None) -> None:
        self._service, self._on_change = service, on_change
        self._loaded: dict[str, Adapter] = {}
        self._refused: set[Entry] = set()  # for which the log has the reason
        self._syncing = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None  # until the process ends

    async def check(self, model: str, name: str, folder: str) -> str | Fault | None:
        """The adapter's digest, or why the engine cannot have it. None if the engine is of another model."""
        if model != self._service.model_id:
            return None
        try:
            if name in self._service.args.lora_adapters:
                raise InvalidParameter(f"lora_name: {name!r} is in lora_adapters and stays", param="lora_name")
            return (await asyncio.to_thread(self._service.open_adapter, folder)).digest
        except LlamaError as error:
            return fault_of(InvalidParameter(error.message, param=error.param or "lora_path"))

    async def sync(self) -> None:
        """Have the adapters that the store has. One whose files cannot be read, or have changed, is left out."""
        async with self._syncing:
            loaded = {}
            for name, entry in (await in_passing_thread(stored, self._service.model_id)).items():
                adapter = self._loaded.get(name)
                if adapter is None or adapter.digest != entry.digest:
                    adapter = await self._opened(name, entry)
                if adapter is not None:
                    loaded[name] = adapter
            if loaded != self._loaded:
                log.info("loaded adapters: %s", ", ".join(map(repr, loaded)) or "none")
                self._loaded = loaded
                self._service.load_adapters(loaded)
                self._on_change()

    async def start(self) -> None:
        """Keep in step with the store from now on."""
        await self.sync()
        self._keeping = asyncio.get_running_loop().create_task(self._keep_in_step())

    async def _keep_in_step(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            try:
                await self.sync()
            except Exception as error:  # the head is away
                log.debug("the loaded adapters are unknown: %s", type(error).__name__)

    async def _opened(self, name: str, entry: Entry) -> Adapter | None:
        try:
            adapter = await asyncio.to_thread(self._service.open_adapter, entry.folder)
            if adapter.digest == entry.digest:
                return adapter
            reason = "its files have changed since it was loaded"
        except LlamaError as error:
            reason = error.message
        if entry not in self._refused:
            self._refused.add(entry)
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

    def __init__(self, engine: Engine, deployment: str) -> None:
        """engine: that of the HTTP layer. deployment: the engines'."""
        self._engine, self._deployment = engine, deployment

    async def load(self, name: str, folder: str, base: str | None, *, replaces: bool) -> None:
        """Returns when this process serves the adapter. replaces: another one of the same name may be loaded. Raises
        InvalidParameter or NotReady."""
        known, model = self._engine.models.get(name), self._base(base)
        if known is not None and not (replaces and isinstance(known, AdapterModel) and known.parent == model):
            raise InvalidParameter("lora_name: a model of this name is served", param="lora_name")
        digests = set()
        for answer in await call_all(self._deployment, "check_adapter", model, name, folder):
            if isinstance(answer, Fault):
                raise error_of(answer)
            digests |= {answer} - {None}
        if not digests:
            raise NotReady("no engine answers")
        if len(digests) > 1:
            raise InvalidParameter("lora_path: the nodes of the engines have different files there", param="lora_path")
        entry = Entry(folder, digests.pop())
        await self._tell(model, name, entry)
        if not await self._is_shown(lambda: self._digest(name) == entry.digest):
            raise NotReady("no engine has the adapter yet")

    async def unload(self, name: str, base: str | None) -> bool:
        """New requests do not find the adapter; streams that use it go on. False if it has not been loaded. Raises
        InvalidParameter."""
        known = self._engine.models.get(name)
        model = known.parent if isinstance(known, AdapterModel) and base is None else self._base(base)
        entry = (await in_passing_thread(stored, model)).get(name)
        if entry is None:
            return False
        await self._tell(model, name, None)
        await self._is_shown(lambda: self._digest(name) != entry.digest)
        return True

    async def _tell(self, model: str, name: str, entry: Entry | None) -> None:
        await in_passing_thread(store, model, name, entry)
        await call_all(self._deployment, "sync_adapters")

    async def _is_shown(self, condition: Callable[[], bool]) -> bool:
        """Whether the connections of a front have told it the change in time."""
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True

    def _digest(self, name: str) -> str:
        known = self._engine.models.get(name)
        return known.adapter if isinstance(known, AdapterModel) else ""

    def _base(self, base: str | None) -> str:
        """Raises InvalidParameter."""
        bases = [name for name, engine in self._engine.models.items() if not isinstance(engine, AdapterModel)]
        if base is None and len(bases) == 1:
            return bases[0]
        if base not in bases:
            names = ", ".join(map(repr, bases))
            raise InvalidParameter(f"base_model_name: must be one of {names}", param="base_model_name")
        return base
