"""The weights of the architecture: their names in each file format, their shapes, how ranks divide them, and in which tensors
ranks hold them. Readers, plans, estimates and backends follow this table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from llama_core.model_config import ModelConfig
from llama_core.rank_share import RankShare

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"

# What a dimension of a weight consists of. Ranks divide the first five, which are names of RankShare's ranges.
Extent = Literal["heads", "kv_heads", "hidden", "vocab", "columns", "dim", "head", "tokens"]
_DIVISIONS: Final = ("heads", "kv_heads", "hidden", "vocab", "columns")


class _Module(NamedTuple):
    """A linear layer [outputs, inputs], or the factors of a norm [outputs].

    name, hugging_face, gguf: in Meta's, Hugging Face's and GGUF files. tensor: what a rank holds it in, after earlier modules
    of the same tensor; the last part of the name if empty. bias, only_if: the field of ModelConfig that says whether the bias,
    or the module, exists. is_rotated: its rows are of heads that the rotary embedding turns, which formats order differently.
    """

    name: str
    hugging_face: str
    gguf: str
    outputs: Extent
    inputs: Extent | None = None
    tensor: str = ""
    bias: str = ""
    only_if: str = ""
    is_rotated: bool = False


_EMBEDDING: Final = _Module("tok_embeddings", "model.embed_tokens", "token_embd", "tokens", "columns")
_LAYER: Final = (
    _Module("attention.wq", "self_attn.q_proj", "attn_q", "heads", "dim", "qkv", "attention_bias", is_rotated=True),
    _Module("attention.wk", "self_attn.k_proj", "attn_k", "kv_heads", "dim", "qkv", "attention_bias", is_rotated=True),
    _Module("attention.wv", "self_attn.v_proj", "attn_v", "kv_heads", "dim", "qkv", "attention_bias"),
    _Module("attention.wo", "self_attn.o_proj", "attn_output", "dim", "heads", "out", "attention_out_bias"),
    _Module("feed_forward.w1", "mlp.gate_proj", "ffn_gate", "hidden", "dim", "gate_up", "mlp_bias"),
    _Module("feed_forward.w2", "mlp.down_proj", "ffn_down", "dim", "hidden", "down", "mlp_bias"),
    _Module("feed_forward.w3", "mlp.up_proj", "ffn_up", "hidden", "dim", "gate_up", "mlp_bias"),
    _Module("attention_norm", "input_layernorm", "attn_norm", "dim"),
    _Module("ffn_norm", "post_attention_layernorm", "ffn_norm", "dim"),
    _Module("attention.q_norm", "self_attn.q_norm", "attn_q_norm", "head", only_if="qk_norm", is_rotated=True),
    _Module("attention.k_norm", "self_attn.k_norm", "attn_k_norm", "head", only_if="qk_norm", is_rotated=True),
)
_TOP: Final = (
    _Module("norm", "model.norm", "output_norm", "dim"),
    _Module("output", "lm_head", "output", "vocab", "dim"),
)


class Box(NamedTuple):
    """A region of a weight: for each dimension, indices in [start, start + shape)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Full shape of a weight, and the dimension along which ranks divide it (None: every rank has all of it).

    tensor: what a rank holds it in, such as "layers.0.qkv" or "layers.0.qkv_bias"; several weights may share one. is_linear:
    the matrix of a linear layer. hugging_face, gguf: its names there. is_rotated: see `_Module`. division: of what the divided
    dimension consists. unit: indices of the dimension for each of them.
    """

    shape: tuple[int, ...]
    tensor: str
    is_linear: bool
    hugging_face: str
    gguf: str
    is_rotated: bool
    rank_dim: int | None
    division: Extent
    unit: int

    def part(self, share: RankShare) -> Box:
        """The region that a rank loads."""
        start, shape = [0] * len(self.shape), list(self.shape)
        if self.rank_dim is not None:
            own: range = getattr(share, self.division)
            start[self.rank_dim], shape[self.rank_dim] = own.start * self.unit, len(own) * self.unit
        return Box(tuple(start), tuple(shape))


def equal_part(shape: tuple[int, ...], dim: int | None, count: int) -> tuple[int, ...]:
    """`shape` divided into `count` equal parts along `dim`."""
    return tuple(size // count if d == dim else size for d, size in enumerate(shape))


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight of the architecture in the model's order, by the name that Meta's checkpoints give it.

    Biases and the norms of q and k, which Meta's models do not have, are named after their projections. A tied model has
    OUTPUT too: readers give it the embedding's values.
    """
    specs = _specs(config, _EMBEDDING)
    for i in range(config.n_layers):
        for module in _LAYER:
            specs |= _specs(config, module, f"layers.{i}.", f"model.layers.{i}.", f"blk.{i}.")
    for module in _TOP:
        specs |= _specs(config, module)
    return specs


def _specs(
    config: ModelConfig, module: _Module, ours: str = "", hugging_face: str = "", gguf: str = ""
) -> dict[str, WeightSpec]:
    """The weight and the bias of a module, as far as the model has them. ours, hugging_face, gguf: beginnings of names."""
    if module.only_if and not getattr(config, module.only_if):
        return {}
    found = {}
    extents = {"weight": (module.outputs,) if module.inputs is None else (module.outputs, module.inputs)}
    if module.bias and getattr(config, module.bias):
        extents["bias"] = (module.outputs,)
    for kind, each in extents.items():
        rank_dim = next((dim for dim, extent in enumerate(each) if extent in _DIVISIONS), None)
        divided = each[rank_dim or 0]
        found[f"{ours}{module.name}.{kind}"] = WeightSpec(
            shape=tuple(_size(config, extent) for extent in each),
            tensor=f"{ours}{module.tensor or module.name.rpartition('.')[2]}{'_bias' if kind == 'bias' else ''}",
            is_linear=len(each) == 2 and module is not _EMBEDDING,
            hugging_face=f"{hugging_face}{module.hugging_face}.{kind}",
            gguf=f"{gguf}{module.gguf}.{kind}",
            is_rotated=module.is_rotated,
            rank_dim=rank_dim,
            division=divided,
            unit=config.head_dim if divided in ("heads", "kv_heads") else 1,
        )
    return found


def _size(config: ModelConfig, extent: Extent) -> int:
    match extent:
        case "dim" | "columns":
            return config.dim
        case "heads":
            return config.query_width
        case "kv_heads":
            return config.kv_width
        case "head":
            return config.head_dim
        case "hidden":
            return config.hidden_dim
        case "vocab" | "tokens":
            return config.vocab_size


def first_rows(specs: Mapping[str, WeightSpec], share: RankShare) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """The first row of each weight in the tensor that a rank holds it in, and the shapes of the tensors by their names."""
    first: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in specs.items():
        rows, *columns = spec.part(share).shape
        first[name] = shapes.get(spec.tensor, (0,))[0]
        shapes[spec.tensor] = (first[name] + rows, *columns)
    return first, shapes


def num_values(config: ModelConfig, share: RankShare) -> int:
    """Values in all weights that a rank loads."""
    return sum(math.prod(spec.part(share).shape) for spec in weight_specs(config).values())
