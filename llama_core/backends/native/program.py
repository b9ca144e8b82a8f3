"""A model as the native engine runs it: the tensors of a rank, and the operations on buffers of a row for each token.

| Kind | Effect |
|---|---|
| EMBEDDING | to = rows of the tensor |
| NORM | to = RMSNorm of from with the factors offset + `tensor`, or without factors; a copy if eps is 0 |
| LINEAR | to = from times the matrix + the bias `other`, over all ranks unless to QKV; to the residual, to += factor * that |
| GATED_LINEAR | to = SwiGLU, or another gate, of from times the matrix + the bias `other` |
| ROTATION | of queries, keys and values in QKV: norms of heads (`tensor` of q, `other` of k; as NORM), rotation, cache |
| ATTENTION | to = attention of the layer's queries, perhaps gated; `tensor`: sinks; factor: of scores, 0 for head_dim ** -0.5 |
| ROUTE | the `chosen` of `experts` for each row, by from times the router `tensor` + the bias `other` |
| EXPERT_GATES | GATED_LINEAR of each chosen expert |
| EXPERT_SUM | the sum of LINEAR of each chosen expert, times its weight |
| TOKEN_GATE | to *= the sigmoid of from times the one row of `tensor`, a number for each token |
| ADDITION | to += factor * from |
| HEAD | logits of the tensor, after a norm with the factors offset + `other` |
"""

import ctypes
from collections.abc import Iterator, Mapping
from typing import Final

from llama_core.backends.native.library import Buffer, Kind, Operation, Tensor, Variant, WeightPart
from llama_core.model.config import ModelConfig
from llama_core.model.operations import (
    Add,
    Again,
    Angles,
    Attend,
    ExpertSum,
    GatedExperts,
    GatedLinear,
    Layer,
    Linear,
    Norm,
    Rotate,
    Route,
    TokenGate,
    Weight,
)
from llama_core.model.share import RankShare
from llama_core.model.weights import EMBEDDING, FINAL_NORM, OUTPUT, first_rows, weight_specs

_ACTIVATIONS: Final = {
    "silu": Variant.PLAIN,
    "gelu_tanh": Variant.GELU_TANH,
    "clamped_swiglu": Variant.CLAMPED_SWIGLU,
}


class NativeModel:
    """The model's tensors on one rank, numbered from 1, and its operations, as arrays that `llama_create` reads."""

    def __init__(self, model: ModelConfig, share: RankShare, formats: Mapping[str, str]) -> None:
        """formats: of the matrices, by name."""
        self._specs = weight_specs(model)
        self._first, shapes = first_rows(self._specs, share)
        self._numbers = {name: number for number, name in enumerate(shapes, 1)}
        self._eps, self._n_experts = model.norm_eps, model.n_experts
        self._tables = {angles: number for number, angles in enumerate(model.angles, 1)} | {Angles(None): 0}
        tensors = [Tensor(*(*shape, 1)[:2]) for shape in shapes.values()]
        linear = {name: spec for name, spec in self._specs.items() if spec.takes_adapters and name != OUTPUT}
        modules = [self.part(name, spec.part(share).shape) for name, spec in linear.items()]
        operations = list(self._operations(model))
        self._tensors = (Tensor * len(tensors))(*tensors)
        names = (formats[name].encode() if name in formats else None for name in shapes)
        self._formats = (ctypes.c_char_p * len(tensors))(*names)
        self._modules = (WeightPart * len(modules))(*modules)
        self._program = (Operation * len(operations))(*operations)

    @property
    def arguments(self) -> tuple[object, ...]:
        """Of `llama_create`, behind the shape."""
        counted = self._modules, len(self._modules), self._program, len(self._program)
        return self._tensors, self._formats, len(self._tensors), *counted

    def part(self, name: str, shape: tuple[int, ...]) -> WeightPart:
        """Where a rank holds its part of a weight, which has this shape."""
        return WeightPart(self._numbers[self._specs[name].tensor], self._first[name], *(*shape, 1)[:2])

    def _number(self, layer: str, weight: Weight | None, kind: str = "weight") -> int:
        """Of a weight's tensor; 0 for none."""
        spec = weight and self._specs.get(f"{layer}{weight.name.format(0)}.{kind}")
        return self._numbers[spec.tensor] if spec else 0

    def _tensors_of(self, layer: str, weight: Weight) -> tuple[int, int]:
        """Of a matrix, or of all experts' matrices, and of its biases."""
        return self._number(layer, weight), self._number(layer, weight, "bias")

    def _operations(self, model: ModelConfig) -> Iterator[Operation]:
        whole = [self._numbers[self._specs[name].tensor] for name in (EMBEDDING, OUTPUT)]
        yield Operation(Kind.EMBEDDING, Buffer.RESIDUAL, Buffer.RESIDUAL, whole[0])
        if model.norms_embedding:
            yield Operation(Kind.NORM, Buffer.RESIDUAL, Buffer.RESIDUAL, eps=self._eps)
        for i, layer in enumerate(model.layers):
            yield from self._layer(i, layer)
        last_norm = {"other": self._number("", FINAL_NORM), "eps": self._eps, "offset": model.norm_offset}
        yield Operation(Kind.HEAD, Buffer.RESIDUAL, Buffer.RESIDUAL, whole[1], **last_norm)

    def _layer(self, i: int, layer: Layer) -> Iterator[Operation]:
        value, begin = Buffer.RESIDUAL, f"layers.{i}."
        routed: dict[str, int] = {}
        for operation, following in zip(layer, (*layer[1:], None), strict=True):
            source = value
            match operation:
                case Norm(weight, eps):
                    value = Buffer.PROJECTED if isinstance(following, Add) else Buffer.NORMED
                    factors, eps = self._number(begin, weight), eps or self._eps
                    yield Operation(Kind.NORM, source, value, factors, eps=eps, offset=weight.offset)
                case Linear(_, parts) | GatedLinear(_, parts):
                    if source == Buffer.RESIDUAL:  # products take their inputs from other buffers
                        source = Buffer.NORMED
                        yield Operation(Kind.NORM, Buffer.RESIDUAL, source)
                    kind, value, factor, variant = Kind.LINEAR, Buffer.QKV, 1.0, Variant.PLAIN
                    if isinstance(operation, GatedLinear):
                        kind, value = Kind.GATED_LINEAR, Buffer.GATED
                        if parts[0].outputs == "shared_hidden":  # another width than in layers without experts
                            value = Buffer.SHARED
                        variant = _ACTIVATIONS[operation.activation]
                    elif isinstance(following, Add):
                        value, factor = Buffer.RESIDUAL, following.multiplier
                    elif operation.is_summed:
                        value = Buffer.PROJECTED
                    tensors = self._tensors_of(begin, parts[0])
                    yield Operation(kind, source, value, *tensors, factor=factor, variant=variant)
                case Rotate():
                    yield self._rotation(i, operation)
                case Route(router, top_k, norm_topk, scales_inputs):
                    variant, value = Variant.PLAIN if norm_topk else Variant.SCORES_ALL, Buffer.NORMED
                    variant = Variant.SCALES_INPUTS if scales_inputs else variant
                    if source == Buffer.RESIDUAL:
                        yield Operation(Kind.NORM, source, value)
                    routed = {"experts": self._n_experts, "chosen": top_k}
                    yield Operation(
                        Kind.ROUTE, value, value, *self._tensors_of(begin, router), variant=variant, **routed
                    )
                case GatedExperts(_, parts, activation):
                    variant, value = _ACTIVATIONS[activation], Buffer.GATED
                    yield Operation(
                        Kind.EXPERT_GATES, source, value, *self._tensors_of(begin, parts[0]), variant=variant, **routed
                    )
                case ExpertSum(_, (down,)):
                    value = Buffer.RESIDUAL if isinstance(following, Add) else Buffer.PROJECTED
                    factor = following.multiplier if isinstance(following, Add) else 1.0
                    yield Operation(
                        Kind.EXPERT_SUM, source, value, *self._tensors_of(begin, down), factor=factor, **routed
                    )
                case Attend(window, scale, is_gated, sinks):
                    value, variant = Buffer.ATTENDED, Variant.SIGMOID_GATE if is_gated else Variant.PLAIN
                    of, scale = self._number(begin, sinks), scale or 0.0
                    yield Operation(
                        Kind.ATTENTION, source, value, of, layer=i, window=window, factor=scale, variant=variant
                    )
                case Add(multiplier):
                    value = Buffer.RESIDUAL
                    if source == Buffer.PROJECTED:  # else the product before has added
                        yield Operation(Kind.ADDITION, source, value, factor=multiplier)
                case Again():
                    value = Buffer.NORMED  # which nothing has overwritten since
                case TokenGate(weight):
                    yield Operation(Kind.TOKEN_GATE, Buffer.NORMED, value, self._number(begin, weight))

    def _rotation(self, i: int, how: Rotate) -> Operation:
        q, k = (self._number(f"layers.{i}.", each) for each in how.norms or (None, None))
        return Operation(
            Kind.ROTATION,
            Buffer.QKV,
            Buffer.QKV,
            q,
            k,
            layer=i,
            query_table=self._tables[how.queries],
            key_table=self._tables[how.keys],
            variant=Variant.ALL_HEADS if how.norms_all_heads else Variant.PLAIN,
            eps=self._eps if how.norms or how.has_plain_norms else 0.0,
            offset=how.norms[0].offset if how.norms else 0.0,
        )
