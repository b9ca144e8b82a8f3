"""A layer as a list of operations over declared weights: backends, readers, plans and adapters follow it.

The operations of a layer pass a value on, which is the residual at the layer's begin and after each `Add`.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from llama_core.errors import ConfigError
from llama_core.model.rope import RopeConfig

FULL_ATTENTION = 0  # a window without a limit

# What a dimension of a weight consists of. Ranks divide the first ones, which are names of RankShare's ranges.
Divided = Literal["heads", "each_head", "kv_heads", "hidden", "expert_hidden", "shared_hidden", "vocab", "columns"]
Extent = Literal[Divided, "dim", "head", "tokens", "experts", "one"]


@dataclass(frozen=True, slots=True)
class Weight:
    """The matrix [outputs, inputs] of a linear layer, or the factors [outputs] of a norm.

    name, hugging_face, gguf: in Meta's, Hugging Face's and GGUF files, without the layer and ".weight". Weights of one
    operation with the same name in a file lie there one below the other. has_bias: beside a bias [outputs]. is_rotated: rows
    are of heads that the rotary embedding turns, which formats order differently. offset: of a norm, whose factors are offset +
    weight; GGUF files hold the factors. of_experts: each expert has one, with its number for {} in name and hugging_face; GGUF
    files hold those of all experts in one tensor. rows: how Hugging Face's files hold them, if they do that too; then, or if
    is_bare, ".weight" does not follow the name there, and "_bias" the name of the bias. alone: the name in files of a tensor
    for each expert, as quantizers write them, where others have rows.
    """

    name: str
    hugging_face: str
    gguf: str
    outputs: Extent
    inputs: Extent | None = None
    has_bias: bool = False
    is_rotated: bool = False
    offset: float = 0.0
    of_experts: bool = False
    rows: "ExpertRows | None" = None
    is_bare: bool = False
    alone: str = ""


class ExpertRows(NamedTuple):
    """Rows of a weight in each expert's part of a tensor of all experts: every `step`-th from `first`; if in_blocks, block
    `first` of `step` equal ones. is_turned: the part is [inputs, outputs]."""

    first: int = 0
    step: int = 1
    is_turned: bool = False
    in_blocks: bool = False

    def of(self, size: int) -> slice:
        """Of a part that has so many rows."""
        rows = size // self.step
        return (
            slice(self.first * rows, (self.first + 1) * rows) if self.in_blocks else slice(self.first, None, self.step)
        )


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of the value (Zhang and Sennrich 2019). eps: the model's if None."""

    weight: Weight
    eps: float | None = None


@dataclass(frozen=True, slots=True)
class Linear:
    """The value times the matrices of `parts`, which a rank holds in one tensor, one below the other. Where ranks divide the
    inputs, their products are added."""

    tensor: str
    parts: tuple[Weight, ...]

    @property
    def is_summed(self) -> bool:
        return self.parts[0].inputs != "dim"


@dataclass(frozen=True, slots=True)
class Temperature:
    """Of queries (Nakanishi 2025): a query at position p is multiplied by 1 + beta ln(1 + floor((p + ahead) / every))."""

    beta: float
    every: int
    ahead: int = 0


class Angles(NamedTuple):
    """Of a rotary table: the embedding, and by what its cosines and sines are multiplied. None: no rotation, 1."""

    rope: RopeConfig | None
    temperature: Temperature | None = None


@dataclass(frozen=True, slots=True)
class Rotate:
    """Of queries, keys and values: norms of q and k, the rotary embedding of both (Su et al. 2021), and the write of keys and
    values to the cache. The value then is the queries, with the gates behind the values where there are some.

    norms: of each head, or of all heads together, by their weights' extent. has_plain_norms: of each head, without factors.
    """

    rope: RopeConfig | None
    norms: tuple[Weight, Weight] | None = None
    has_plain_norms: bool = False
    temperature: Temperature | None = None

    @property
    def queries(self) -> Angles:
        return Angles(self.rope, self.temperature)

    @property
    def keys(self) -> Angles:
        return Angles(self.rope)

    @property
    def norms_all_heads(self) -> bool:
        return self.norms is not None and self.norms[0].outputs == "heads"


@dataclass(frozen=True, slots=True)
class Attend:
    """Grouped-query attention (Ainslie et al. 2023). window: the latest positions that a query sees, its own included (Beltagy
    et al. 2020); if negative, those up to its own in its chunk of -window positions. scale: of scores; head_dim ** -0.5 if
    None. is_gated: outputs are multiplied by the sigmoids of gates (Qiu et al. 2025). sinks: a score for each head, of a
    position without a value (Xiao et al. 2024)."""

    window: int = FULL_ATTENTION
    scale: float | None = None
    is_gated: bool = False
    sinks: Weight | None = None


Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """SwiGLU or GeGLU (Shazeer 2020): the activation of the value times the first part, times the value times the second.

    clamped_swiglu, of gpt-oss: g sigmoid(1.702 g) (u + 1) for g of at most 7, and u from -7 to 7.
    """

    tensor: str
    parts: tuple[Weight, Weight]
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class Route:
    """The choice of experts for each token (Shazeer et al. 2017): the `top_k` with the largest logits, of equal ones those
    with lower numbers. The logits are the value times `router`. The value stays.

    norm_topk: the weights of these experts sum to 1; else they are those of the softmax over all experts. scales_inputs: the
    weights are 1; the sigmoid of an expert's logit multiplies its input (Llama 4).
    """

    router: Weight
    top_k: int
    norm_topk: bool = True
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """`GatedLinear` of each chosen expert. A rank holds the parts of all experts in one tensor."""

    tensor: str
    parts: tuple[Weight, Weight]
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class ExpertSum:
    """`Linear` of each chosen expert. The value then is the sum of their results times their weights, in the order of the
    experts."""

    tensor: str
    parts: tuple[Weight]


@dataclass(frozen=True, slots=True)
class Add:
    """The residual += the value * multiplier. The value then is the residual."""

    multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class Again:
    """After experts and their `Add`: the value becomes the one that the `Norm` before the experts made of the residual."""


@dataclass(frozen=True, slots=True)
class TokenGate:
    """In a shared expert: the value times a number for each token, the sigmoid of `weight` times what `Again` took."""

    weight: Weight


Operation = Norm | Linear | Rotate | Attend | GatedLinear | Route | GatedExperts | ExpertSum | Add | Again | TokenGate
Product = Linear | GatedLinear | GatedExperts | ExpertSum
Layer = tuple[Operation, ...]


def weights_of(operation: Operation) -> tuple[Weight, ...]:
    """The weights of an operation in the model's order."""
    match operation:
        case Norm(weight) | Route(weight) | TokenGate(weight):
            return (weight,)
        case Linear(_, parts) | GatedLinear(_, parts) | GatedExperts(_, parts) | ExpertSum(_, parts):
            return parts
        case Rotate():
            return operation.norms or ()
        case Attend(sinks=Weight() as sinks):
            return (sinks,)
        case _:
            return ()


_DIM: Final[tuple[str, ...]] = ("dim",)
_QKV: Final = ("heads", "kv_heads", "kv_heads")
_GATED_QKV: Final = (*_QKV, "heads")
# What a product may take and make.
_SUMMED: Final = ((("heads",), _DIM), (("hidden",), _DIM), (("shared_hidden",), _DIM))
_LINEAR: Final = ((_DIM, _QKV), (_DIM, _GATED_QKV), *_SUMMED)
_GATED: Final = ((_DIM, ("hidden", "hidden")), (_DIM, ("shared_hidden", "shared_hidden")))
_ROUTED: Final = ("dim", "experts")
_NORMED_EXPERTS: Final = (Norm, Route, GatedExperts, ExpertSum, Add)  # none of which overwrites what the norm has made


def check_layer(layer: Layer, place: str) -> None:
    """Raises ConfigError, with the operation's place, for a list whose widths do not fit, in which an operation would have no
    effect, or that no backend computes."""
    value = _DIM
    names: set[str] = set()
    before: Operation = Add()
    for number, operation in enumerate(layer):
        at = f"{place}, operation {number} ({type(operation).__name__})"
        weights = weights_of(operation)
        own = [each.name for each in weights]
        made: tuple[str, ...] = tuple(each.outputs for each in weights)
        taken = given = _DIM
        match operation:
            case Norm(weight) if made != value or isinstance(before, Norm) or weight.has_bias:
                raise ConfigError(f"{at}: norms {', '.join(made)}, but the value before it is {', '.join(value)}")
            case Linear(tensor) | GatedLinear(tensor):
                taken, given = tuple({each.inputs or "nothing": None for each in weights}), made
                computed = _LINEAR if isinstance(operation, Linear) else _GATED
                if (taken, made) not in computed or (taken == _DIM and isinstance(before, Linear)):
                    raise ConfigError(f"{at}: no backend multiplies {', '.join(taken)} to {', '.join(made)}")
                if len({each.has_bias for each in weights}) > 1:
                    raise ConfigError(f"{at}: all its weights have a bias, or none has")
                given = made[:1] if isinstance(operation, GatedLinear) else made
                own.append(tensor)
            case Rotate():
                is_gated = value == _GATED_QKV
                taken, given = (_GATED_QKV, ("queries", "gates")) if is_gated else (_QKV, ("queries",))
                if made not in ((), ("head", "head"), ("heads", "kv_heads")) or (made and operation.has_plain_norms):
                    raise ConfigError(f"{at}: norms {', '.join(made)}, which must be of heads")
            case Attend() if made not in ((), ("each_head",)):
                raise ConfigError(f"{at}: has sinks of {', '.join(made)}, which must be of each head")
            case Attend(is_gated=is_gated):
                taken, given = ("queries", "gates") if is_gated else ("queries",), ("heads",)
            case Route() if made != ("experts",):
                raise ConfigError(f"{at}: scores {', '.join(made)}, which must be experts")
            case Route():
                given = _ROUTED
            case GatedExperts(tensor):
                taken, given = _ROUTED, ("expert_hidden",)
                own.append(tensor)
            case ExpertSum(tensor):
                taken, given = ("expert_hidden",), made
                own.append(tensor)
            case Add() if isinstance(before, Add):
                raise ConfigError(f"{at}: adds the residual to itself")
            case Add() if isinstance(before, Again):
                raise ConfigError(f"{at}: adds the value of a norm")
            case Again() if tuple(map(type, layer[max(0, number - 5) : number])) != _NORMED_EXPERTS:
                raise ConfigError(f"{at}: must follow Norm, experts and Add")
            case TokenGate() if (*made, *value) != ("one", "shared_hidden") or not isinstance(layer[number - 2], Again):
                raise ConfigError(f"{at}: gates {', '.join(value)} by {', '.join(made)}, not a shared expert by one")
            case TokenGate():
                taken = given = value
        if value != taken:
            raise ConfigError(f"{at}: takes {', '.join(taken)}, but the value before it is {', '.join(value)}")
        if twice := [each for each in own if each in names]:
            raise ConfigError(f"{at}: {twice[0]} has been used before")
        names.update(own)
        value, before = given, operation
    if not isinstance(before, Add) or not layer:
        raise ConfigError(f"{place}: does not end with Add, so that its last operations have no effect")
    if sum(isinstance(each, Attend) for each in layer) != 1:
        raise ConfigError(f"{place}: must have one Attend, because it has one cache")
