"""What backends need of a weight format: how the weights of linear layers are held in memory and multiplied.

Embeddings and norms are always held in the model's dtype. `find_weight_format` finds the format with a name. The native
backend computes with the C++ header of the same name in `native/weight_formats/`.
"""

import importlib
from typing import NamedTuple, Protocol, cast

import torch

from llama_core.checkpoint.loader import GroupedWeight
from llama_core.execution.weight_formats.registry import PLAIN, QUANTIZED


class HeldWeights(NamedTuple):
    """The weights of one linear layer, [outputs, inputs], as kernels read them.

    codes: [outputs, bytes of a row], int8, or uint8 where two codes are packed in a byte or a byte is a float8_e4m3fn; without
    scales the weights themselves. scales: float16 [outputs, groups], or float32 [outputs]. minima: as scales, in formats
    that have them.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    is_packed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.scales, self.minima) if each is not None)


class TorchMatrix(Protocol):
    """The weights of one linear layer on a device, [outputs, inputs], as torch and Triton multiply them."""

    @property
    def held(self) -> HeldWeights:
        """The same tensors for the life of the matrix."""

    @property
    def nbytes(self) -> int: ...

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        """Write outputs from `first`. weight [n, inputs]: in the model's dtype, or in groups that the format holds as they
        are."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> [T, outputs]. Waits for nothing and depends on no value, so that a CUDA graph can capture it."""


class TorchMatrixType(Protocol):
    """A class of TorchMatrix."""

    def __call__(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> TorchMatrix:
        """Allocate the matrix without values. dtype: of the activations. batch_invariant: the bits of a row of a product do not
        depend on the number of rows; needs Triton."""


class WeightFormat(Protocol):
    """One format. The runner calls it on every rank.

    name: of the format; also the name of its kernels in the native engine. bytes_per_weight: in memory, with the scales of
    groups, for the memory plan. torch_matrix: how torch and Triton hold the weights.
    """

    @property
    def name(self) -> str: ...
    @property
    def bytes_per_weight(self) -> float: ...
    @property
    def torch_matrix(self) -> TorchMatrixType: ...

    def native_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The rows of `weight` [outputs, inputs] for the C++ `pack` of this format: float32 or bfloat16, contiguous."""


def find_weight_format(name: str) -> WeightFormat:
    """The format with a name in PLAIN or QUANTIZED."""
    module, _, attribute = {**PLAIN, **QUANTIZED}[name].partition(":")
    return cast(WeightFormat, getattr(importlib.import_module(module), attribute))
