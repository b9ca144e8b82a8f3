"""The matrices of each weight format in torch, with Triton's products on a GPU: in the model's dtype, or in codes.

Without Triton a product expands quantized weights first. Dense weights are quantized here: groups by the rules of llama.cpp's
Q8_0, Q4_0 and Q4_1, or with one scale for each output.
"""

import logging
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from llama_core.backends.weight_formats.format import HeldWeights, TorchMatrix, TorchMatrixType
from llama_core.files.source import GROUP
from llama_core.model.weight_formats import CODINGS
from llama_core.weights.loader import GroupedWeight

_FP8_MAX: Final = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantize_groups(weight: torch.Tensor, name: str) -> GroupedWeight:
    """weight [n, k] in the format `name` of groups; k is a multiple of GROUP. Scales and minima are exact in float16."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    if name == "int8_groups":
        step = groups.abs().amax(-1) / 127
        return GroupedWeight(_nearest(groups * _inverse(step)).to(torch.int8).flatten(1), _half(step), None)
    if name == "int4":
        # The value of the largest magnitude has the code 0, so that it is exact; the sign of the scale is its opposite.
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        step = extreme / -8
        return GroupedWeight(_to_nibbles(groups * _inverse(step) + 8), _half(step), None)
    assert name == "int4_min", name
    least, greatest = groups.aminmax(dim=-1)
    step = (greatest - least) / 15
    return GroupedWeight(_to_nibbles((groups - least[..., None]) * _inverse(step)), _half(step), _half(least))


def quantize_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> int8 [n, k] and one float32 scale for each output [n]."""
    wide = weight.float()
    step = wide.abs().amax(-1) / 127
    return _nearest(wide * _inverse(step)).to(torch.int8), step


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> float8_e4m3fn [n, k], rounded to nearest even, and one float32 scale for each output [n]."""
    wide = weight.float()
    step = wide.abs().amax(-1) / _FP8_MAX
    # A product may exceed the largest value by rounding, which would become NaN.
    return (wide * _inverse(step)).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), step


def _inverse(step: torch.Tensor) -> torch.Tensor:
    """1 / step, 0 where step is 0, for a multiplication along the last dimension."""
    return torch.where(step == 0, 0.0, 1 / step)[..., None]


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """Halves are rounded away from zero, as C's roundf does."""
    return torch.trunc(values + torch.copysign(torch.full_like(values, 0.5), values))


def _to_nibbles(values: torch.Tensor) -> torch.Tensor:
    return (values + 0.5).to(torch.int32).clamp(0, 15).to(torch.uint8).flatten(1)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()


log = logging.getLogger(__name__)

_FEWEST_PADDED: Final = 256
Product = Callable[..., torch.Tensor]  # `F.linear`, `multiply_in_order`, or `kernels.multiply`


@cache
def triton_product(device_type: str) -> Product | None:
    """The product in Triton where it works, else None."""
    if device_type != "cuda":
        return None
    try:
        from llama_core.backends.weight_formats.kernels import multiply

        zeros = torch.zeros((16, 64), dtype=torch.int8, device=device_type)
        multiply(zeros.half(), HeldWeights(zeros, torch.zeros(16, device=device_type)))
    except Exception as error:  # any error of Triton, the compiler or the file system
        log.warning("Triton does not work here: each product expands quantized weights: %s", error)
        return None
    return multiply


class PlainMatrix(TorchMatrix):
    """In the model's own dtype."""

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        self.weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
        self.held = HeldWeights(self.weight)
        self._product: Product = F.linear
        if batch_invariant:
            # Imported here, because most machines without a GPU have no Triton.
            from llama_core.backends.weight_formats.invariant_kernels import multiply_in_order

            self._product = multiply_in_order

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        assert isinstance(weight, torch.Tensor), "the weight plan expands weights in plain matrices"
        self.weight[first : first + len(weight)].copy_(weight)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight)

    def part(self, rows: slice) -> "PlainMatrix":
        part = copy(self)
        part.weight = self.weight[rows]
        part.held = HeldWeights(part.weight)
        return part


class QuantizedMatrix(TorchMatrix):
    """Of codes, in the format `name`."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._name, self._inputs = name, inputs
        self.held = self._allocated(outputs, device)
        self._product = triton_product(device.type)
        if batch_invariant:
            from llama_core.backends.weight_formats.kernels import multiply

            self._product = partial(multiply, batch_invariant=True)

    def _allocated(self, outputs: int, device: torch.device) -> HeldWeights:
        raise NotImplementedError

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._product is None:
            return F.linear(x, self.dequantized().to(x.dtype))
        return self._product(x, self.held)

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        raise NotImplementedError

    def part(self, rows: slice) -> "QuantizedMatrix":
        part = copy(self)
        codes, scales, minima, is_packed = self.held
        scales, minima = (each if each is None else each[rows] for each in (scales, minima))
        part.held = HeldWeights(codes[rows], scales, minima, is_packed)
        return part


class OneScaleMatrix(QuantizedMatrix):
    """Codes of one byte [outputs, inputs], one float32 scale for each output: int8, or the bits of float8_e4m3fn, which Triton
    reads as bytes, because GPUs before sm_89 have no such type."""

    def _allocated(self, outputs: int, device: torch.device) -> HeldWeights:
        self._is_fp8 = self._name == "fp8"
        code_type = torch.uint8 if self._is_fp8 else torch.int8
        self._codes = torch.zeros((outputs, self._inputs), dtype=code_type, device=device)
        self._scales = torch.zeros(outputs, device=device)
        return HeldWeights(self._codes, self._scales)

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        assert isinstance(weight, torch.Tensor), "no checkpoint stores these codes"
        codes, scales = (quantize_fp8 if self._is_fp8 else quantize_outputs)(weight)
        rows = slice(first, first + len(weight))
        self._codes[rows], self._scales[rows] = codes.view(self._codes.dtype), scales

    def dequantized(self) -> torch.Tensor:
        codes, scales, *_ = self.held
        assert scales is not None
        return (codes.view(torch.float8_e4m3fn).float() if self._is_fp8 else codes) * scales[:, None]


class GroupedMatrix(QuantizedMatrix):
    """Weights in groups of GROUP inputs that share a scale, and in int4_min a minimum; the last group is filled up with zeros.
    GGUF calls int8_groups Q8_0, int4 Q4_0 and int4_min Q4_1.

    codes: int8 [outputs, inputs], or uint8 [outputs, inputs / 2], where byte j of a group has code j in its low half and code
    j + 16 in its high half. scales and minima: float16 [outputs, groups], padded (`_padded`).
    """

    def _allocated(self, outputs: int, device: torch.device) -> HeldWeights:
        self._is_packed = self._name != "int8_groups"
        self._groups = -(-self._inputs // GROUP)
        width, code_type = self._groups * GROUP, torch.int8
        if self._is_packed:
            width, code_type = width // 2, torch.uint8
        self._codes = torch.zeros((outputs, width), dtype=code_type, device=device)
        self._scales = torch.zeros((outputs, _padded(self._groups)), dtype=torch.float16, device=device)
        self._minima = torch.zeros_like(self._scales) if self._name == "int4_min" else None
        return HeldWeights(self._codes, self._scales, self._minima, self._is_packed)

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        if isinstance(weight, GroupedWeight):
            codes, scales, minima = weight
        else:
            padding = -weight.shape[1] % GROUP
            codes, scales, minima = quantize_groups(F.pad(weight, (0, padding)), self._name)
        target = slice(first, first + len(codes))
        if self._is_packed:
            low, high = codes.reshape(len(codes), -1, 2, GROUP // 2).unbind(-2)
            codes = (low | (high << 4)).flatten(1)
        self._codes[target].copy_(codes)
        self._scales[target, : self._groups].copy_(scales)
        if self._minima is not None:
            # A checkpoint may store one part of the matrix without minima: (code - 8) * scale is the same with -8 * scale.
            self._minima[target, : self._groups].copy_(scales * -8 if minima is None else minima)

    def dequantized(self) -> torch.Tensor:
        codes, scales, minima, is_packed = self.held
        assert scales is not None
        codes = codes.view(len(codes), self._groups, -1)
        if is_packed:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        scales = scales[:, : self._groups, None].float()
        weights: torch.Tensor = (codes.float() - 8) * scales if self._name == "int4" else codes * scales
        if minima is not None:
            weights = weights + minima[:, : self._groups, None].float()
        return weights.flatten(1)[:, : self._inputs]


def _padded(groups: int) -> int:
    """The scales of an output. Kernels copy scales ahead of their use only where each output's begin at a multiple of 16; fewer
    groups would grow by more than a sixteenth."""
    return groups if groups < _FEWEST_PADDED else -(-groups // 16) * 16


def _native_alone(*_: object, **__: object) -> TorchMatrix:
    raise LookupError("torch holds no such codes: its plans expand them")


class WeightFormat(NamedTuple):
    """bytes_per_weight: in memory, with the scales of groups, for the memory plan. torch_matrix: how torch and Triton hold the
    weights."""

    bytes_per_weight: float
    torch_matrix: TorchMatrixType


_FORMATS: Final = {
    "bfloat16": WeightFormat(2, PlainMatrix),
    "float16": WeightFormat(2, PlainMatrix),
    "float32": WeightFormat(4, PlainMatrix),
    "int8": WeightFormat(1, partial(OneScaleMatrix, "int8")),
    "fp8": WeightFormat(1, partial(OneScaleMatrix, "fp8")),
    "int8_groups": WeightFormat(1 + 2 / 32, partial(GroupedMatrix, "int8_groups")),
    "int4": WeightFormat(0.5 + 2 / 32, partial(GroupedMatrix, "int4")),
    "int4_min": WeightFormat(0.5 + 4 / 32, partial(GroupedMatrix, "int4_min")),
}


def find_weight_format(name: str) -> WeightFormat:
    """The format with this name: the model's dtype, or one of QUANTIZED or CODINGS of `llama_core.model.weight_formats`.

    The native backend computes with the C++ header of the same name in `native/weight_formats/`, if there is one."""
    if name in _FORMATS:
        return _FORMATS[name]
    return WeightFormat(CODINGS[name].native_bytes, _native_alone)
