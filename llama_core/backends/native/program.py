"""A model as the native engine runs it: the tensors of a rank, and the operations on buffers of a row for each token.

| Kind | Effect |
|---|---|
| EMBEDDING | to = rows of the tensor |
| NORM | to = RMSNorm of from with the factors `tensor`; a copy without a tensor |
| LINEAR | to = from times the matrix + the bias `other`, over all ranks unless to QKV; to the residual, to += factor * that |
| GATED_LINEAR | to = SwiGLU of from times the matrix + the bias `other` |
| ROTATION | of queries, keys and values in QKV: norms of heads (`tensor` of q, `other` of k), rotary embedding, cache |
| ATTENTION | to = attention of the layer's queries; factor: of scores, 0 for head_dim ** -0.5 |
| ADDITION | to += factor * from |
| HEAD | logits of the tensor, after a norm with the factors `other` |
"""

import ctypes
from collections.abc import Iterator, Mapping

from llama_core.backends.native.library import Buffer, Kind, Operation, Tensor, WeightPart
from llama_core.model.config import ModelConfig
from llama_core.model.operations import Add, Attend, GatedLinear, Layer, Linear, Norm, Rotate, Weight
from llama_core.model.share import RankShare
from llama_core.model.weights import EMBEDDING, FINAL_NORM, OUTPUT, first_rows, weight_specs


class NativeModel:
    """The model's tensors on one rank, numbered from 1, and its operations, as arrays that `llama_create` reads."""

    def __init__(self, model: ModelConfig, share: RankShare, formats: Mapping[str, str]) -> None:
        """formats: of the matrices, by name."""
        self._specs = weight_specs(model)
        self._first, shapes = first_rows(self._specs, share)
        self._numbers = {name: number for number, name in enumerate(shapes, 1)}
        tensors = [Tensor(*(*shape, 1)[:2]) for shape in shapes.values()]
        linear = {name: spec for name, spec in self._specs.items() if spec.is_linear and name != OUTPUT}
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
        spec = weight and self._specs.get(f"{layer}{weight.name}.{kind}")
        return self._numbers[spec.tensor] if spec else 0

    def _operations(self, model: ModelConfig) -> Iterator[Operation]:
        whole = [self._numbers[self._specs[name].tensor] for name in (EMBEDDING, OUTPUT)]
        yield Operation(Kind.EMBEDDING, Buffer.RESIDUAL, Buffer.RESIDUAL, whole[0])
        for i, layer in enumerate(model.layers):
            yield from self._layer(i, layer)
        yield Operation(Kind.HEAD, Buffer.RESIDUAL, Buffer.RESIDUAL, whole[1], self._number("", FINAL_NORM))

    def _layer(self, i: int, layer: Layer) -> Iterator[Operation]:
        value, begin = Buffer.RESIDUAL, f"layers.{i}."
        for operation, following in zip(layer, (*layer[1:], None), strict=True):
            source = value
            match operation:
                case Norm(weight):
                    value = Buffer.PROJECTED if isinstance(following, Add) else Buffer.NORMED
                    yield Operation(Kind.NORM, source, value, self._number(begin, weight))
                case Linear(_, parts) | GatedLinear(_, parts):
                    if source == Buffer.RESIDUAL:  # products take their inputs from other buffers
                        source = Buffer.NORMED
                        yield Operation(Kind.NORM, Buffer.RESIDUAL, source)
                    kind, value, factor = Kind.LINEAR, Buffer.QKV, 1.0
                    if isinstance(operation, GatedLinear):
                        kind, value = Kind.GATED_LINEAR, Buffer.GATED
                    elif isinstance(following, Add):
                        value, factor = Buffer.RESIDUAL, following.multiplier
                    elif operation.is_summed:
                        value = Buffer.PROJECTED
                    matrix, bias = (self._number(begin, parts[0], each) for each in ("weight", "bias"))
                    yield Operation(kind, source, value, matrix, bias, factor=factor)
                case Rotate(rope, norms):
                    q, k = (self._number(begin, each) for each in norms or (None, None))
                    yield Operation(Kind.ROTATION, source, source, q, k, layer=i, rotates=rope is not None)
                case Attend(window, scale):
                    value = Buffer.ATTENDED
                    yield Operation(Kind.ATTENTION, source, value, layer=i, window=window, factor=scale or 0.0)
                case Add(multiplier):
                    value = Buffer.RESIDUAL
                    if source == Buffer.PROJECTED:  # else the product before has added
                        yield Operation(Kind.ADDITION, source, value, factor=multiplier)
