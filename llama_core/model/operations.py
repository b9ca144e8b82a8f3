"""A layer as a list of operations over declared weights: backends, readers, plans and adapters follow it.

The operations of a layer pass a value on, which is the residual at the layer's begin and after each `Add`.
"""

from dataclasses import dataclass
from typing import Literal

from llama_core.errors import ConfigError
from llama_core.model.rope import RopeConfig

FULL_ATTENTION = 0  # a window without a limit

# What a dimension of a weight consists of. Ranks divide the first five, which are names of RankShare's ranges.
Extent = Literal["heads", "kv_heads", "hidden", "vocab", "columns", "dim", "head", "tokens"]


@dataclass(frozen=True, slots=True)
class Weight:
    """The matrix [outputs, inputs] of a linear layer, or the factors [outputs] of a norm.

    name, hugging_face, gguf: in Meta's, Hugging Face's and GGUF files, without the layer and ".weight". Weights of one
    operation with the same name in a file lie there one below the other. has_bias: beside a bias [outputs]. is_rotated: rows
    are of heads that the rotary embedding turns, which formats order differently.
    """

    name: str
    hugging_face: str
    gguf: str
    outputs: Extent
    inputs: Extent | None = None
    has_bias: bool = False
    is_rotated: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of the value (Zhang and Sennrich 2019)."""

    weight: Weight


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
class Rotate:
    """Of queries, keys and values: norms of each head of q and k, the rotary embedding of both (Su et al. 2021), and the write
    of keys and values to the cache. The value then is the queries."""

    rope: RopeConfig | None
    norms: tuple[Weight, Weight] | None = None


@dataclass(frozen=True, slots=True)
class Attend:
    """Grouped-query attention (Ainslie et al. 2023). window: the latest positions that a query sees, its own included (Beltagy
    et al. 2020). scale: of scores; head_dim ** -0.5 if None."""

    window: int = FULL_ATTENTION
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """SwiGLU (Shazeer 2020): silu of the value times the first part, times the value times the second."""

    tensor: str
    parts: tuple[Weight, Weight]


@dataclass(frozen=True, slots=True)
class Add:
    """The residual += the value * multiplier. The value then is the residual."""

    multiplier: float = 1.0


Operation = Norm | Linear | Rotate | Attend | GatedLinear | Add
Layer = tuple[Operation, ...]


def weights_of(operation: Operation) -> tuple[Weight, ...]:
    """The weights of an operation in the model's order."""
    match operation:
        case Norm(weight):
            return (weight,)
        case Linear(_, parts) | GatedLinear(_, parts):
            return parts
        case Rotate(_, norms):
            return norms or ()
        case _:
            return ()


def check_layer(layer: Layer, place: str) -> None:
    """Raises ConfigError, with the operation's place, for a list whose widths do not fit, or in which an operation or a weight
    would have no effect."""
    value: tuple[str, ...] = ("dim",)
    names: set[str] = set()
    for number, operation in enumerate(layer):
        at = f"{place}, operation {number} ({type(operation).__name__})"
        weights = weights_of(operation)
        taken: tuple[str, ...]
        given: tuple[str, ...]
        match operation:
            case Norm():
                taken = given = tuple(each.outputs for each in weights)
            case Linear():
                taken, given = _inputs(weights), tuple(each.outputs for each in weights)
            case GatedLinear():
                taken, given = _inputs(weights), tuple({each.outputs: None for each in weights})
            case Rotate():
                taken, given = ("heads", "kv_heads", "kv_heads"), ("queries",)
            case Attend():
                taken, given = ("queries",), ("heads",)
            case Add():
                taken, given = ("dim",), ("dim",)
        if value != taken:
            raise ConfigError(f"{at}: takes {', '.join(taken)}, but the value before it is {', '.join(value)}")
        if twice := [each.name for each in weights if each.name in names]:
            raise ConfigError(f"{at}: {twice[0]} has been used before")
        if isinstance(operation, Add) and (number == 0 or isinstance(layer[number - 1], Add)):
            raise ConfigError(f"{at}: adds the residual to itself")
        names.update(each.name for each in weights)
        value = given
    if not layer or not isinstance(layer[-1], Add):
        raise ConfigError(f"{place}: does not end with Add, so that its last operations have no effect")
    if sum(isinstance(each, Attend) for each in layer) != 1:
        raise ConfigError(f"{place}: must have one Attend, because it has one cache")


def _inputs(weights: tuple[Weight, ...]) -> tuple[str, ...]:
    """What the parts of one product take: each the same."""
    return tuple({each.inputs or "nothing": None for each in weights})
