"""The architecture of a model, independent of the files that describe it. Frozen, validated, no torch.

`checkpoint/` reads it from Meta's params.json, from Hugging Face's config.json, or from GGUF metadata.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from llama_core.errors import ConfigError

MAX_LAYERS = 10_000  # Llama's largest model has 126; the server lists the names of every layer's weights
MAX_SIZE = 2**31 - 1
MAX_CONTEXT = 2**24  # no model has more; a file that says more would let ranks make tables of terabytes
MAX_THETA = 1e12  # of real models: 1e9
MAX_ROPE_FACTOR = 1e6  # and the least is its inverse: frequencies stay finite in float32
FULL_ATTENTION = 0  # in `ModelConfig.windows`

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `backends.rotary.rotary_table` has the formula of each kind.

    theta: the base of the frequencies. factor: by how much `kind` stretches the context. original_context: positions that the
    model was trained on before the stretch (dynamic, llama3, yarn). low_freq_factor, high_freq_factor: llama3's bounds on
    wavelengths. beta_fast, beta_slow, truncate: yarn's bounds on rotations. attention_factor: yarn's multiple of cos and sin.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def check(self, source: str) -> None:
        """Raises ConfigError that names `source` and the field at fault."""
        if self.kind not in get_args(RopeKind):
            raise ConfigError(f"{source}: rope type {self.kind!r} is not supported")
        if not 1 < self.theta <= MAX_THETA:
            raise ConfigError(f"{source}: rope theta must be more than 1, at most {MAX_THETA:g}, is {self.theta}")
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ):
            value = getattr(self, name)
            if not 1 / MAX_ROPE_FACTOR <= value <= MAX_ROPE_FACTOR:
                allowed = f"from {1 / MAX_ROPE_FACTOR:g} to {MAX_ROPE_FACTOR:g}"
                raise ConfigError(f"{source}: rope {name} must be {allowed}, is {value}")
        if self.kind in ("dynamic", "llama3", "yarn") and not self.original_context:
            raise ConfigError(f"{source}: rope type {self.kind} needs the original context length")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(f"{source}: rope high_freq_factor must be greater than low_freq_factor")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family.

    dim: width of the hidden states. hidden_dim: width of the feed-forward layer. vocab_size: rows of the embedding, at least
    the number of the tokenizer's ids. tied_embeddings: the output layer has the embedding's weights. attention_bias: q, k and v
    have biases; attention_out_bias: the output projection of the attention; mlp_bias: all three of the feed-forward layer.
    qk_norm: RMSNorm on each head of q and k, before the rotation. windows: for each layer the number of latest positions,
    its own included, that a position attends to, FULL_ATTENTION for all; () if every layer has full attention.
    context_length: positions that the model can use; None if the files do not say.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    context_length: int | None = None

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.n_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """The attention window of a layer in positions, FULL_ATTENTION for none."""
        return self.windows[layer] if self.windows else FULL_ATTENTION

    @property
    def longest_window(self) -> int:
        """Positions beyond which no layer attends, FULL_ATTENTION if some layer attends to all."""
        return FULL_ATTENTION if FULL_ATTENTION in self.windows else max(self.windows, default=FULL_ATTENTION)

    def check(self, source: str) -> "ModelConfig":
        """Raises ConfigError for fields that are out of range or do not make a model together.

        Returns itself, with a context of at most MAX_CONTEXT positions.
        """
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"):
            value = getattr(self, name)
            if not 0 < value <= (MAX_LAYERS if name == "n_layers" else MAX_SIZE):
                raise ConfigError(f"{source}: {name} is {value}, which is out of range")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"{source}: n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"{source}: head_dim is {self.head_dim}, rotary embedding needs an even number")
        if self.query_width > MAX_SIZE:
            raise ConfigError(f"{source}: n_heads {self.n_heads} and head_dim {self.head_dim} are too large together")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ConfigError(f"{source}: norm_eps must be a positive finite number, is {self.norm_eps}")
        if self.windows and (len(self.windows) != self.n_layers or min(self.windows) < 0):
            raise ConfigError(f"{source}: the sliding windows do not fit {self.n_layers} layers")
        self.rope.check(source)
        if self.context_length is not None and self.context_length > MAX_CONTEXT:
            return replace(self, context_length=MAX_CONTEXT)
        return self

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError unless every rank gets at least one query head."""
        if not 1 <= world_size <= self.n_heads:
            raise ConfigError(
                f"model_parallel_size {world_size} is more than the {self.n_heads} query heads of this checkpoint",
                param="model_parallel_size",
            )
