"""How the weights of one linear layer are held in memory and multiplied, as torch's and Triton's layers see them.

Embeddings and norms are always held in the model's dtype.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from llama_core.weights.loader import GroupedWeight

Bias = torch.Tensor | None  # [outputs] of a product, added to each of its rows


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


class TorchMatrix:
    """The weights of one linear layer on a device, [outputs, inputs]. held: the same tensors for the life of the matrix."""

    held: HeldWeights

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        """Write outputs from `first`. weight [n, inputs]: in the model's dtype, or in groups that the format holds as they
        are."""
        raise NotImplementedError

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> [T, outputs]. Waits for nothing and depends on no value, so that a CUDA graph can capture it."""
        raise NotImplementedError

    def part(self, rows: slice) -> "TorchMatrix":
        """The matrix of some outputs, with the same memory."""
        raise NotImplementedError


# (outputs, inputs, dtype of the activations, device, batch_invariant=False) -> a matrix without values. batch_invariant: the
# bits of a row of a product do not depend on the number of rows, which needs Triton.
TorchMatrixType = Callable[..., TorchMatrix]
