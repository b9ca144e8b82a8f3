"""The architecture of a model, independent of the files that describe it. Frozen, validated, no torch."""

import math
from dataclasses import dataclass, replace

from llama_core.errors import ConfigError
from llama_core.model.operations import FULL_ATTENTION, Angles, Attend, Layer, Rotate, Route, check_layer
from llama_core.model.rope import RopeConfig

# Hidden units that do not divide evenly are given out in this unit: quantized weights have one scale for 32 inputs.
HIDDEN_UNIT = 32
MAX_LAYERS = 10_000  # Llama's largest model has 126; the server lists the names of every layer's weights
MAX_SIZE = 2**31 - 1
MAX_EXPERTS = 4096  # of a layer; Kimi K2 has 384
MAX_CHOSEN = 64
MAX_ALL_EXPERTS = 2**18  # of all layers: their weights have names
MAX_CONTEXT = 2**24  # no model has more; a file that says more would let ranks make tables of terabytes


def num_rows(given: int, num_tokens: int, what: str) -> int:
    """`given` rows of an embedding, which may be padded. Raises ConfigError where the tokenizer has more tokens."""
    if given < num_tokens:
        raise ConfigError(
            f"{what} is {given}, but the tokenizer has {num_tokens} tokens: tokenizer and checkpoint belong to different models"
        )
    return given


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: an embedding, layers, a norm, and an output layer.

    dim: width of the residual. hidden_dim: width of the feed-forward layer. vocab_size: rows of the embedding, at least the
    number of the tokenizer's ids. layers: the operations of each. tied_embeddings: the output layer has the embedding's
    weights. context_length: positions that the model can use; None if the files do not say. embedding_multiplier: of the
    embedding, rounded to the model's dtype. norms_embedding: RMSNorm of the embedding, without factors. logits_divisor: of the
    logits. logits_cap: logits become cap * tanh(logits / cap); None for no such cap. norm_offset: of the last norm, see
    `Weight.offset`. n_experts, expert_dim: of layers with experts their number, and the width of each. shared_dim: the width of
    an expert that all tokens share.
    """

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    layers: tuple[Layer, ...]
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    context_length: int | None = None
    embedding_multiplier: float = 1.0
    norms_embedding: bool = False
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    norm_offset: float = 0.0
    n_experts: int = 0
    expert_dim: int = 0
    shared_dim: int = 0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of the first layer that has one."""
        return next((each.rope for each in self.angles if each.rope is not None), RopeConfig())

    @property
    def angles(self) -> tuple[Angles, ...]:
        """The different rotary tables of all layers, for queries and keys, but for those that change nothing."""
        operations = (each for layer in dict.fromkeys(self.layers) for each in layer)
        rotations = (each for each in operations if isinstance(each, Rotate))
        return tuple(
            dict.fromkeys(one for each in rotations for one in (each.queries, each.keys) if one != Angles(None))
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """For each layer the latest positions that a query sees at most, FULL_ATTENTION for all."""
        return tuple(abs(each.window) for layer in self.layers for each in layer if isinstance(each, Attend))

    @property
    def longest_window(self) -> int:
        """Positions beyond which no layer attends, FULL_ATTENTION if some layer attends to all."""
        windows = self.windows
        return FULL_ATTENTION if FULL_ATTENTION in windows else max(windows)

    def check(self, source: str) -> "ModelConfig":
        """Raises ConfigError for fields that are out of range or do not make a model together.

        Returns itself, with a context of at most MAX_CONTEXT positions.
        """
        for name in ("dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"):
            if not 0 < (value := getattr(self, name)) <= MAX_SIZE:
                raise ConfigError(f"{source}: {name} is {value}, which is out of range")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"{source}: n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"{source}: head_dim is {self.head_dim}, rotary embedding needs an even number")
        if self.query_width > MAX_SIZE:
            raise ConfigError(f"{source}: n_heads {self.n_heads} and head_dim {self.head_dim} are too large together")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ConfigError(f"{source}: norm_eps must be a positive finite number, is {self.norm_eps}")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise ConfigError(f"{source}: n_layers is {len(self.layers)}, which is out of range")
        for layer in dict.fromkeys(self.layers):
            check_layer(layer, f"{source}: layer {self.layers.index(layer)}")
        self._check_experts(source)
        ropes = [each.rope for each in self.angles if each.rope is not None] or [RopeConfig()]
        for rope in ropes:
            rope.check(source, self.head_dim)
        if len({rope.rotated(self.head_dim) for rope in ropes}) > 1:
            raise ConfigError(f"{source}: layers that rotate different parts of a head are not supported")
        if self.context_length is not None and self.context_length > MAX_CONTEXT:
            return replace(self, context_length=MAX_CONTEXT)
        return self

    def _check_experts(self, source: str) -> None:
        routes = [each for layer in self.layers for each in layer if isinstance(each, Route)]
        if not routes:
            return
        chosen = max(each.top_k for each in routes)
        rows = self.n_experts * max(
            2 * (self.expert_dim + HIDDEN_UNIT), self.dim + HIDDEN_UNIT
        )  # of one tensor, padded
        is_bounded = self.n_experts <= MAX_EXPERTS and chosen <= MAX_CHOSEN and rows <= MAX_SIZE
        is_bounded = is_bounded and self.n_experts * len(routes) <= MAX_ALL_EXPERTS
        if not (
            is_bounded and 0 < min(each.top_k for each in routes) <= chosen <= self.n_experts and self.expert_dim > 0
        ):
            raise ConfigError(
                f"{source}: chooses {chosen} of {self.n_experts} experts that are {self.expert_dim} wide, which is out of range"
            )

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError unless every rank gets at least one query head, and a part of every expert."""
        width = min(self.expert_dim, self.shared_dim or self.expert_dim)
        if self.n_experts and world_size > width:
            raise ConfigError(
                f"model_parallel_size {world_size} is more than the width {width} of an expert",
                param="model_parallel_size",
            )
        if not 1 <= world_size <= self.n_heads:
            raise ConfigError(
                f"model_parallel_size {world_size} is more than the {self.n_heads} query heads of this checkpoint",
                param="model_parallel_size",
            )
