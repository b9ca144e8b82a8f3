"""A model, or one of its adapters, as one request sees it: with the tokenizer and the templates of one engine, also while
engines come and go."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, Protocol

from deployments.engine.interface import Engine, EngineState, SamplingDefaults
from deployments.engine.sequence_stream import SequenceStream
from llama_core.scheduling.request import Request
from llama_core.text.model_text import ModelText


class EngineText(NamedTuple):
    """tokenizer_digest: of what decides the tokens of a text."""

    text: ModelText
    tokenizer_digest: str
    defaults: SamplingDefaults


class Submits(Protocol):
    """Implemented by `ServedModel`. The methods are those of `Engine`."""

    model_id: str

    @property
    def latest(self) -> EngineState: ...
    @property
    def text(self) -> EngineText: ...
    @property
    def served_numerics(self) -> Set[str]: ...
    def next_seed(self) -> int: ...
    def cache_scope(self, owner: str) -> str: ...
    def check_capacity(self, owner: str = "") -> None: ...
    def describe(self) -> EngineState: ...
    async def submit(
        self, request: Request, *, is_timed: bool = False, numerics: str = "", text: EngineText | None = None
    ) -> Sequence[SequenceStream]:
        """text: that the request was planned with."""

    async def readmit(self, streams: Sequence[SequenceStream], *, is_timed: bool = False) -> None: ...


class ModelView:
    """Implements `Engine`."""

    def __init__(self, model: Submits, model_id: str, adapter: str = "") -> None:
        """adapter: the digest."""
        self.model_id, self.adapter = model_id, adapter
        self.parent = None if model_id == model.model_id else model.model_id
        self._model, self._text = model, model.text
        self.tokenizer, self.chat_format, self.answer_format = self._text.text
        self.sampling_defaults = self._text.defaults
        state = model.latest
        self.max_seq_len = state.max_seq_len
        # A prompt that waits alone may be longer than max_queue_tokens.
        max_waiting = max(state.max_queue_tokens, state.max_seq_len)
        self.max_request_tokens = state.max_batch_size * state.max_seq_len + max_waiting
        self.next_seed, self.cache_scope, self.check_capacity = model.next_seed, model.cache_scope, model.check_capacity
        self.readmit = model.readmit

    @property
    def served_numerics(self) -> Set[str]:
        return self._model.served_numerics

    def describe(self) -> EngineState:
        return self._model.describe()

    async def submit(self, request: Request, *, is_timed: bool = False, numerics: str = "") -> Sequence[SequenceStream]:
        if self.adapter:
            request = replace(request, terms=replace(request.terms, adapter=self.adapter))
        return await self._model.submit(request, is_timed=is_timed, numerics=numerics, text=self._text)


class ModelViews(Mapping[str, Engine]):
    """A model by its own name and by those of its adapters. Each view is made when it is asked for."""

    def __init__(self, model: Submits, digests: Mapping[str, str]) -> None:
        """digests: of the adapters by name. None has the model's name."""
        self._model, self._digests = model, digests

    def __getitem__(self, name: str) -> Engine:
        return ModelView(self._model, name, "" if name == self._model.model_id else self._digests[name])

    def __iter__(self) -> Iterator[str]:
        yield self._model.model_id
        yield from (name for name in self._digests if name != self._model.model_id)

    def __len__(self) -> int:
        return len({self._model.model_id, *self._digests})
