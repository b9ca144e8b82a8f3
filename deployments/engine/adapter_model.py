"""An engine under the name of one of its LoRA adapters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from deployments.engine.interface import Engine, TokenStream
from llama_core.scheduling.request import Request


class AdapterModel:
    """Like the engine, whose attributes it has, but for the model's name and the adapter of its requests."""

    def __init__(self, engine: Engine, model_id: str, adapter: str) -> None:
        """adapter: the digest."""
        self.model_id = model_id
        self.parent = engine.model_id
        self._engine = engine
        self.adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def submit(self, request: Request, *, is_timed: bool = False, numerics: str = "") -> Sequence[TokenStream]:
        request = replace(request, terms=replace(request.terms, adapter=self.adapter))
        return await self._engine.submit(request, is_timed=is_timed, numerics=numerics)


class AdapterModels(Mapping[str, Engine]):
    """An engine by its own name and by those of its adapters, of which each is made when it is asked for."""

    def __init__(self, engine: Engine, digests: Mapping[str, str]) -> None:
        """digests: of the adapters by name. None has the engine's name."""
        self._engine, self._digests = engine, digests

    def __getitem__(self, name: str) -> Engine:
        if name == self._engine.model_id:
            return self._engine
        return cast(Engine, AdapterModel(self._engine, name, self._digests[name]))

    def __iter__(self) -> Iterator[str]:
        yield self._engine.model_id
        yield from (name for name in self._digests if name != self._engine.model_id)

    def __len__(self) -> int:
        return len({self._engine.model_id, *self._digests})
