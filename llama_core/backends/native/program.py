"""A model as the native engine runs it: the tensors of a rank, and the operations on buffers of a row for each token.

| Kind | Effect |
|---|---|
| EMBEDDING | to = rows of the tensor |
| NORM | to = RMSNorm of from with the factors `tensor`; a copy without a tensor |
| LINEAR | to = from times the matrix + the bias `other`, over the ranks where is_summed; to the residual, to += factor * that |
| GATED_LINEAR | to = SwiGLU of from times the matrix + the bias `other` |
| ROTATION | of queries, keys and values in QKV: norms of heads (`tensor` of q, `other` of k), rotary embedding, cache |
| HEADS | the same without rotary embedding |
| ATTENTION | to = attention of the layer's queries; factor: of scores, 0 for head_dim ** -0.5 |
| ADDITION | to += factor * from |
| HEAD | logits of the tensor, after a norm with the factors `other` |
"""

import ctypes
from collections.abc import Iterator, Mapping

from llama_core.backends.native.library import Buffer, Kind, Operation, Part, Tensor, TensorKind
from llama_core.model.config import ModelConfig
from llama_core.model.operations import Add, Attend, GatedLinear, Layer, Linear, Norm, Rotate, Weight
from llama_core.model.share import RankShare
from llama_core.model.weights import EMBEDDING, FINAL_NORM, OUTPUT, first_rows, weight_specs

NONE = -1  # no tensor


class NativeModel:
    """The model's tensors on one rank, by number, and its operations, as arrays that `llama_create` reads."""

    def __init__(self, model: ModelConfig, share: RankShare, formats: Mapping[str, str]) -> None:
        """formats: of the matrices, by name."""
        self._model = model
        self._specs = weight_specs(model)
        self._first, shapes = first_rows(self._specs, share)
        gated = {
            f"layers.{i}.{each.tensor}{end}"
            for i, layer in enumerate(model.layers)
            for each in layer
            if isinstance(each, GatedLinear)
            for end in ("", "_bias")
        }
        self._numbers = {name: number for number, name in enumerate(shapes)}
        tensors = []
        for name, shape in shapes.items():
            kind = (
                TensorKind.MATRIX if name in formats else TensorKind.EMBEDDING if len(shape) == 2 else TensorKind.VECTOR
            )
            if name in gated:
                kind = TensorKind.GATED_MATRIX if name in formats else TensorKind.GATED_VECTOR
            tensors.append(Tensor(kind, *(*shape, 1)[:2]))
        modules = [
            self.part(name, *spec.part(share).shape)
            for name, spec in self._specs.items()
            if spec.is_linear and name != OUTPUT
        ]
        operations = list(self._operations())
        self._tensors = (Tensor * len(tensors))(*tensors)
        self._formats = (ctypes.c_char_p * len(tensors))(
            *(formats[name].encode() if name in formats else None for name in shapes)
        )
        self._modules = (Part * len(modules))(*modules)
        self._program = (Operation * len(operations))(*operations)

    @property
    def arguments(self) -> tuple[object, ...]:
        """Of `llama_create`, behind the shape."""
        arrays = self._modules, self._program
        return self._tensors, self._formats, len(self._tensors), *(each for one in arrays for each in (one, len(one)))

    def part(self, name: str, rows: int, columns: int) -> Part:
        """Where a rank holds its part of a weight."""
        return Part(self._numbers[self._specs[name].tensor], self._first[name], rows, columns)

    def _number(self, layer: str, weight: Weight | None, kind: str = "weight") -> int:
        spec = weight and self._specs.get(f"{layer}{weight.name}.{kind}")
        return self._numbers[spec.tensor] if spec else NONE

    def _operations(self) -> Iterator[Operation]:
        numbers, norm = self._numbers, self._number("", FINAL_NORM)
        yield _operation(Kind.EMBEDDING, Buffer.RESIDUAL, Buffer.RESIDUAL, numbers[self._specs[EMBEDDING].tensor])
        for i, layer in enumerate(self._model.layers):
            yield from self._layer(i, layer)
        yield _operation(Kind.HEAD, Buffer.RESIDUAL, Buffer.RESIDUAL, numbers[self._specs[OUTPUT].tensor], norm)

    def _layer(self, i: int, layer: Layer) -> Iterator[Operation]:
        value, begin = Buffer.RESIDUAL, f"layers.{i}."
        for operation, following in zip(layer, (*layer[1:], None), strict=True):
            source = value
            match operation:
                case Norm(weight):
                    value = Buffer.PROJECTED if isinstance(following, Add) else Buffer.NORMED
                    yield _operation(Kind.NORM, source, value, self._number(begin, weight))
                case Linear(_, parts) | GatedLinear(_, parts):
                    if source == Buffer.RESIDUAL:  # products take their inputs from other buffers
                        source = Buffer.NORMED
                        yield _operation(Kind.NORM, Buffer.RESIDUAL, source)
                    is_summed = isinstance(operation, Linear) and operation.is_summed
                    factor = following.multiplier if isinstance(following, Add) else 1.0
                    kind, value = Kind.LINEAR, Buffer.QKV
                    if isinstance(operation, GatedLinear):
                        kind, value = Kind.GATED_LINEAR, Buffer.GATED
                    elif is_summed:
                        value = Buffer.RESIDUAL if isinstance(following, Add) else Buffer.PROJECTED
                    tensors = (self._number(begin, parts[0], each) for each in ("weight", "bias"))
                    yield _operation(kind, source, value, *tensors, is_summed=is_summed, factor=factor)
                case Rotate(rope, norms):
                    kind = Kind.HEADS if rope is None else Kind.ROTATION
                    q, k = norms or (None, None)
                    yield _operation(kind, source, source, self._number(begin, q), self._number(begin, k), layer=i)
                case Attend(window, scale):
                    value = Buffer.ATTENDED
                    yield _operation(Kind.ATTENTION, source, value, layer=i, window=window, factor=scale or 0.0)
                case Add(multiplier):
                    if source == Buffer.PROJECTED:  # else the product before has added
                        yield _operation(Kind.ADDITION, source, Buffer.RESIDUAL, factor=multiplier)
                    value = Buffer.RESIDUAL


def _operation(
    kind: Kind,
    source: Buffer,
    to: Buffer,
    tensor: int = NONE,
    other: int = NONE,
    *,
    is_summed: bool = False,
    layer: int = 0,
    window: int = 0,
    factor: float = 1.0,
) -> Operation:
    return Operation(kind, source, to, tensor, other, is_summed, layer, window, factor)
