"""What a GPU would do with a model: decodes, prompts, mixed steps, and the cache that its memory holds. All estimated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llama_core.model_config import ModelConfig
from llama_core.step_time.devices import Gpu
from llama_core.step_time.step_time import StepTime, step_time
from llama_core.step_time.work import RankWork, StepLoad

DECODES: Final = (1, 8, 64)
PROMPT: Final = 2048
MIXED_DECODES: Final = 32
# Of the CUDA context and the libraries' workspaces, which torch counts neither as allocated nor as free.
CONTEXT_BYTES: Final = 600 * 2**20


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step. tokens_per_s: sampled tokens of decodes, or prompt tokens of a step without. fits: into the cache."""

    name: str
    load: StepLoad
    time: StepTime
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        return (self.load.decodes or self.load.chunk) / self.time.seconds

    @property
    def share_of_bandwidth(self) -> float:
        """The time to read the step's bytes at the datasheet's bandwidth, of the step's time."""
        return self.time.read_s / self.time.seconds


def loads(context: int) -> list[tuple[str, StepLoad]]:
    """The steps that are estimated, with `context` cached positions for each decode."""
    decodes = [(f"{count} decode{'s' * (count > 1)}", StepLoad(count, context)) for count in DECODES]
    return [
        *decodes,
        (f"prompt {PROMPT:,}", StepLoad(0, 0, PROMPT)),
        (f"{MIXED_DECODES} + prompt {PROMPT:,}", StepLoad(MIXED_DECODES, context, PROMPT)),
    ]


def forecasts(
    model: ModelConfig,
    num_ranks: int,
    gpu: Gpu,
    dtype: str,
    bytes_per_weight: Callable[[str], float],
    context: int,
    cache_tokens: int,
    *,
    cache_itemsize: int | None = None,
) -> list[Forecast]:
    """cache_tokens: that the cache of a rank holds. cache_itemsize: of its values; that of dtype if absent."""
    work = RankWork.of(model, num_ranks, bytes_per_weight, 4 if dtype == "float32" else 2, cache_itemsize)
    found = []
    for name, load in loads(context):
        held = load.decodes * (context + 1) + load.chunk
        found.append(Forecast(name, load, step_time(work, load, gpu, dtype), held <= cache_tokens))
    return found


def cache_bytes(gpu: Gpu, headroom: float, other_bytes: int) -> int:
    """Memory of a rank for its cache: what weights and working memory (`other_bytes`) leave. headroom: part that stays free."""
    return int(gpu.memory_bytes * (1 - headroom)) - CONTEXT_BYTES - other_bytes
