"""The fused backend's matrices with quantized weights: Triton's products on a GPU, and a dequantized product in torch."""

import logging
from abc import ABC, abstractmethod
from functools import cache, partial
from typing import ClassVar, Final, Protocol

import torch
import torch.nn.functional as F

from llama_core.checkpoint.loader import GroupedWeight
from llama_core.checkpoint.source import GROUP
from llama_core.execution.weight_formats.format import HeldWeights, TorchMatrixType
from llama_core.execution.weight_formats.quantize import Codes, quantize_fp8, quantize_groups, quantize_outputs

log = logging.getLogger(__name__)

_FEWEST_PADDED: Final = 256


class Product(Protocol):
    """`kernels.multiply`."""

    def __call__(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        minima: torch.Tensor | None,
        *,
        is_packed: bool,
    ) -> torch.Tensor: ...


def product_for(device: torch.device, *, batch_invariant: bool) -> Product | None:
    """The product in Triton where it works, else None: `F.linear` with dequantized weights, which is not batch-invariant."""
    if batch_invariant:
        from llama_core.execution.weight_formats.kernels import multiply

        return partial(multiply, batch_invariant=True)
    return triton_product(device.type)


@cache
def triton_product(device_type: str) -> Product | None:
    """The product in Triton where it works, else None."""
    if device_type != "cuda":
        return None
    try:
        from llama_core.execution.weight_formats.kernels import multiply

        zeros = torch.zeros((16, 64), dtype=torch.int8, device=device_type)
        multiply(zeros.half(), zeros, torch.zeros(16, device=device_type), None, is_packed=False)
    except Exception as error:  # any error of Triton, the compiler or the file system
        log.warning("Triton does not work here: each product expands quantized weights: %s", error)
        return None
    return multiply


class OneScaleMatrix(ABC):
    """See `TorchMatrix`: codes of one byte [outputs, inputs], one float32 scale for each output."""

    code_type: ClassVar[torch.dtype]

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        self._codes = torch.zeros((outputs, inputs), dtype=self.code_type, device=device)
        self._scales = torch.zeros(outputs, device=device)
        self._product = product_for(device, batch_invariant=batch_invariant)

    @property
    def held(self) -> HeldWeights:
        return HeldWeights(self._codes, self._scales)

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        assert isinstance(weight, torch.Tensor), "no checkpoint stores these codes"
        rows = slice(first, first + len(weight))
        self._codes[rows], self._scales[rows] = self._quantized(weight)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._product is not None:
            return self._product(x, self._codes, self._scales, None, is_packed=False)
        return F.linear(x, self.dequantized().to(x.dtype))

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        return self._values() * self._scales[:, None]

    @abstractmethod
    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of some rows."""

    @abstractmethod
    def _values(self) -> torch.Tensor:
        """The codes as numbers."""


class Int8Matrix(OneScaleMatrix):
    code_type = torch.int8

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_outputs(weight)

    def _values(self) -> torch.Tensor:
        return self._codes


class Fp8Matrix(OneScaleMatrix):
    """The bits of float8_e4m3fn, which Triton reads as bytes: GPUs before sm_89 have no such type."""

    code_type = torch.uint8

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantize_fp8(weight)
        return codes.view(torch.uint8), scales

    def _values(self) -> torch.Tensor:
        return self._codes.view(torch.float8_e4m3fn).float()


class GroupedMatrix:
    """See `TorchMatrix`: weights in groups of GROUP inputs; the last group is filled up with zeros.

    codes: int8 [outputs, inputs], or uint8 [outputs, inputs / 2], where byte j of a group has code j in its low half and code
    j + 16 in its high half. scales and minima: float16 [outputs, groups], padded (`_padded`).
    """

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
        self._name = name
        self._inputs = inputs
        self._is_packed = name != "int8_groups"
        groups = -(-inputs // GROUP)
        width = groups * GROUP // (2 if self._is_packed else 1)
        code_type = torch.uint8 if self._is_packed else torch.int8
        self._codes = torch.zeros((outputs, width), dtype=code_type, device=device)
        self._groups = groups
        self._scales = torch.zeros((outputs, _padded(groups)), dtype=torch.float16, device=device)
        self._minima = torch.zeros_like(self._scales) if name == "int4_min" else None
        self._product = product_for(device, batch_invariant=batch_invariant)

    @property
    def held(self) -> HeldWeights:
        return HeldWeights(self._codes, self._scales, self._minima, self._is_packed)

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        if isinstance(weight, GroupedWeight):
            codes, scales, minima = weight
        else:
            padding = -weight.shape[1] % GROUP
            codes, scales, minima = quantize_groups(F.pad(weight, (0, padding)), self._name)
        self._store(first, Codes(codes, scales, minima))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._product is not None:
            return self._product(x, self._codes, self._scales, self._minima, is_packed=self._is_packed)
        return F.linear(x, self.dequantized().to(x.dtype))

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        codes = self._codes.view(len(self._codes), self._groups, -1)
        if self._is_packed:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        scales = self._scales[:, : self._groups, None].float()
        weights: torch.Tensor = (codes.float() - 8) * scales if self._name == "int4" else codes * scales
        if self._minima is not None:
            weights = weights + self._minima[:, : self._groups, None].float()
        return weights.flatten(1)[:, : self._inputs]

    def _store(self, first: int, rows: Codes) -> None:
        target = slice(first, first + len(rows.codes))
        codes = rows.codes
        if self._is_packed:
            low, high = codes.reshape(len(codes), -1, 2, GROUP // 2).unbind(-2)
            codes = (low | (high << 4)).flatten(1)
        self._codes[target].copy_(codes)
        self._scales[target, : self._groups].copy_(rows.scales)
        if self._minima is not None:
            # A checkpoint may store one part of the matrix without minima: (code - 8) * scale is the same with -8 * scale.
            self._minima[target, : self._groups].copy_(rows.scales * -8 if rows.minima is None else rows.minima)


def _padded(groups: int) -> int:
    """The scales of an output. Kernels copy scales ahead of their use only where each output's begin at a multiple of 16; fewer
    groups would grow by more than a sixteenth."""
    return groups if groups < _FEWEST_PADDED else -(-groups // 16) * 16


def grouped_matrix(name: str) -> TorchMatrixType:
    """The type of matrices in a format of groups."""

    return partial(GroupedMatrix, name)
