"""The weights of the architecture: their names in each file format, their shapes, how ranks divide them, and in which tensors
ranks hold them. Readers, plans, estimates and backends follow this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, get_args

from llama_core.model.config import ModelConfig
from llama_core.model.operations import Divided, ExpertRows, Extent, Product, Weight, weights_of
from llama_core.model.share import RankShare

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"

_EMBEDDING: Final = Weight("tok_embeddings", "model.embed_tokens", "token_embd", "tokens", "columns")
FINAL_NORM: Final = Weight("norm", "model.norm", "output_norm", "dim")
_OUTPUT: Final = Weight("output", "lm_head", "output", "vocab", "dim")


class Box(NamedTuple):
    """A region of a weight: for each dimension, indices in [start, start + shape)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Full shape of a weight, and the dimension along which ranks divide it (None: every rank has all of it).

    tensor: what a rank holds it in, such as "layers.0.qkv" or "layers.0.qkv_bias"; several weights may share one. is_linear:
    the matrix of a linear layer. hugging_face, gguf: the names there of a tensor that has stored_rows rows, of which this
    weight's begin with first_row. is_rotated, offset: see `Weight`. division: of what the divided dimension consists. unit:
    indices of the dimension for each of them. expert: its number, of a weight that each expert has; GGUF files
    hold those of all experts in one tensor, and Hugging Face's do where `rows` says how. alone: its name where they do not.
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
    first_row: int
    stored_rows: int
    offset: float
    expert: int | None = None
    rows: ExpertRows | None = None
    alone: str = ""

    @property
    def takes_adapters(self) -> bool:
        """Whether it may be the matrix of a LoRA adapter's pair."""
        return self.is_linear and self.expert is None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the tensor in Hugging Face's and GGUF files."""
        return (self.stored_rows, *self.shape[1:])

    def part_shape(self, n_experts: int, *, is_turned: bool = True) -> tuple[int, ...]:
        """Of the tensor of all experts, one of whose parts has this weight's `rows`. is_turned: as they are."""
        assert self.rows is not None
        shape = self.shape[0] * self.rows.step, *self.shape[1:]
        return (n_experts, *(shape[::-1] if is_turned and self.rows.is_turned else shape))

    def part(self, share: RankShare) -> Box:
        """The region that a rank loads."""
        start, shape = [0] * len(self.shape), list(self.shape)
        if self.rank_dim is not None:
            own: range = getattr(share, self.division)
            start[self.rank_dim], shape[self.rank_dim] = own.start * self.unit, len(own) * self.unit
        return Box(tuple(start), tuple(shape))


@lru_cache(maxsize=8)
def weight_specs(config: ModelConfig) -> Mapping[str, WeightSpec]:
    """Every weight of the architecture in the model's order, by the name that Meta's checkpoints give it.

    Biases and the norms of q and k, which Meta's models do not have, are named after their projections. A tied model has
    OUTPUT too: readers give it the embedding's values.
    """
    specs = _specs(config, (_EMBEDDING,))
    for i, layer in enumerate(config.layers):
        for operation in layer:
            tensor = operation.tensor if isinstance(operation, Product) else ""
            begins = f"layers.{i}.", f"model.layers.{i}.", f"blk.{i}."
            specs |= _specs(config, weights_of(operation), begins, tensor)
    last_norm = replace(FINAL_NORM, offset=config.norm_offset)
    return specs | _specs(config, (last_norm,)) | _specs(config, (_OUTPUT,))


def _specs(
    config: ModelConfig, weights: tuple[Weight, ...], begins: tuple[str, str, str] = ("", "", ""), tensor: str = ""
) -> dict[str, WeightSpec]:
    """The weights of an operation, with their biases. begins: of their names in the three formats. tensor: the last part of the
    tensor's name, of the weight's own name if empty."""
    found = {}
    ours, hugging_face, gguf = begins
    numbers = range(config.n_experts) if weights and weights[0].of_experts else (None,)
    for expert, weight in ((expert, weight) for expert in numbers for weight in weights):
        together = [
            each for each in weights if each is weight or (each.hugging_face == weight.hugging_face and not each.rows)
        ]
        rows = [_size(config, each.outputs) for each in together]
        extents = {"weight": (weight.outputs,) if weight.inputs is None else (weight.outputs, weight.inputs)}
        if weight.has_bias:
            extents["bias"] = (weight.outputs,)
        is_bare = weight.is_bare or weight.rows is not None
        ends = {"weight": "", "bias": "_bias"} if is_bare else {"weight": ".weight", "bias": ".bias"}
        for kind, each in extents.items():
            rank_dim = next((dim for dim, extent in enumerate(each) if extent in get_args(Divided)), None)
            divided = each[rank_dim or 0]
            found[f"{ours}{weight.name.format(expert)}.{kind}"] = WeightSpec(
                shape=tuple(_size(config, extent) for extent in each),
                tensor=f"{ours}{tensor or weight.name.rpartition('.')[2]}{'_bias' if kind == 'bias' else ''}",
                is_linear=len(each) == 2 and weight is not _EMBEDDING and weight.outputs not in ("experts", "one"),
                hugging_face=f"{hugging_face}{weight.hugging_face.format(expert)}{ends[kind]}",
                gguf=f"{gguf}{weight.gguf}.{kind}",
                is_rotated=weight.is_rotated,
                rank_dim=rank_dim,
                division=divided,
                unit=config.head_dim if divided in ("heads", "kv_heads") else 1,
                first_row=sum(rows[: together.index(weight)]),
                stored_rows=sum(rows),
                offset=weight.offset,
                expert=expert,
                rows=weight.rows,
                alone=weight.alone and f"{hugging_face}{weight.alone.format(expert)}.weight",
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
        case "each_head":
            return config.n_heads
        case "hidden":
            return config.hidden_dim
        case "expert_hidden":
            return config.expert_dim
        case "shared_hidden":
            return config.shared_dim
        case "one":
            return 1
        case "experts":
            return config.n_experts
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
