"""A model as one request sees it: with the tokenizer and the templates of one engine, also while engines come and go."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from deployments.engine.interface import SamplingDefaults, TokenStream
from llama_core.scheduling.request import Request
from llama_core.text.model_text import ModelText


class EngineText(NamedTuple):
    """tokenizer_digest: of what decides the tokens of a text."""

    text: ModelText
    tokenizer_digest: str
    defaults: SamplingDefaults


class Submits(Protocol):
    async def submit(
        self, request: Request, *, is_timed: bool, numerics: str, text: EngineText
    ) -> Sequence[TokenStream]:
        """text: that the request was planned with."""


class ModelView:
    """Like the engine, whose other attributes it has."""

    adapter, parent = "", None

    def __init__(self, engine: Submits, text: EngineText) -> None:
        self._engine, self._text, self.sampling_defaults = engine, text, text.defaults
        self.tokenizer, self.chat_format, self.answer_format = text.text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def submit(self, request: Request, *, is_timed: bool = False, numerics: str = "") -> Sequence[TokenStream]:
        return await self._engine.submit(request, is_timed=is_timed, numerics=numerics, text=self._text)
