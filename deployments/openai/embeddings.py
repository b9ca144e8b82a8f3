"""`/v1/embeddings`: a vector of each text, by any model that generates. The requests share the life of a generating request
(`generation.py`): an embedding is a sequence that ends with its prompt."""

import base64
import math
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from pydantic import Field

from deployments.engine.interface import Engine
from deployments.engine.sequence_stream import SequenceStream
from deployments.openai.answers.answer import CollectedChoice, Sliced
from deployments.openai.errors import Unsupported
from deployments.openai.field_types import Flag, Inputs, OptionalInteger
from deployments.openai.plan import Plan
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.score import ScoringBody
from llama_core.errors import InvalidParameter
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams

MAX_VALUES: Final = 2**22  # of all vectors of an answer: about 85 MB of numbers in decimal digits


class EmbeddingsBody(ScoringBody):
    input: Inputs = Field(description="A text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: of float32, little-endian.")
    dimensions: OptionalInteger = Field(None, ge=1, description="The first so many numbers, normalized again.")
    pooling: Literal["mean", "last", "first"] | None = Field(None, description="Default: the model's.")
    normalize: Flag = Field(None, description="To length 1. Default: as the model's files say.")


class _Form(NamedTuple):
    """Of the vectors in an answer. dimensions: None for all."""

    dimensions: int | None
    normalize: bool
    is_base64: bool

    def of(self, embedding: bytes) -> object:
        """embedding: float32 [dim]. The length is an exact sum, so that its bits are the same on every machine."""
        vector = np.frombuffer(embedding, dtype="<f4")[: self.dimensions]
        if self.normalize:
            values = vector.astype(np.float64)
            vector = (values / max(math.sqrt(math.fsum((values * values).tolist())), 1e-12)).astype("<f4")
        return base64.b64encode(vector.tobytes()).decode() if self.is_base64 else vector.tolist()


async def plan_embeddings(body: EmbeddingsBody, engine: Engine, encoder: PromptEncoder) -> Plan:
    """Raises InvalidRequest where the body contradicts the model, the vocabulary or the context."""
    state = engine.describe()
    of_model, most = state.embedding, state.max_batch_size + state.max_queue
    if len(body.input) > most:
        raise InvalidParameter.of(
            "input", f"must be at most {most} texts, which run (max_batch_size) or wait (max_queue)"
        )
    if of_model.dim and (body.dimensions or 0) > of_model.dim:
        raise InvalidParameter.of("dimensions", f"must be at most {of_model.dim}")
    if (num_values := len(body.input) * (body.dimensions or of_model.dim)) > MAX_VALUES:
        raise InvalidParameter.of("input", f"texts x dimensions must be at most {MAX_VALUES}, not {num_values}")
    if not all(body.input):
        raise InvalidParameter.of("input", "must have no empty text")
    if body.pooling is None and of_model.fault:
        raise Unsupported(f"pooling: this server has mean, last and first, but {of_model.fault}", param="pooling")
    special = body.add_special_tokens is not False
    prompts = await encoder.prompts(body.input, bos=special, n=1, param="input", num_new=0, appends=special)
    params = SamplingParams(temperature=0.0, max_tokens=0, pooling=body.pooling or of_model.pooling)  # type: ignore[arg-type]
    normalize = of_model.normalize if body.normalize is None else body.normalize
    terms = Terms(body.user or "", body.priority or 0)
    form = _Form(body.dimensions, normalize, body.encoding_format == "base64")
    return Plan(Request(prompts, [params] * len(prompts), terms=terms), form=form)


class EmbeddingsSerializer:
    def __init__(self, engine: Engine, plan: Plan, streams: Sequence[SequenceStream]) -> None:
        self._engine = engine
        self._plan = plan
        self._streams = streams

    def whole(self, choices: Sequence[CollectedChoice]) -> Sliced[bytes]:
        """The answer as JSON, made in slices. The choices have no tokens."""
        form: _Form = self._plan.form
        data: list[Any] = []
        for index, stream in enumerate(self._streams):
            if index:
                yield
            item = {"object": "embedding", "index": index, "embedding": form.of(stream.embedding)}
            data.append(msgspec.Raw(msgspec.json.encode(item)))  # a list of floats takes twice the bytes of its digits
        num_tokens = sum(map(len, self._plan.request.prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": self._engine.model_id, "usage": usage})
