"""An engine under the name of one of its LoRA adapters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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

    async def submit(self, request: Request, *, is_timed: bool = False) -> Sequence[TokenStream]:
        return await self._engine.submit(replace(request, adapter=self.adapter), is_timed=is_timed)
