"""Weights in the model's own dtype."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llama_core.checkpoint.loader import GroupedWeight
from llama_core.execution.weight_formats.format import HeldWeights, TorchMatrixType

# x [T, inputs], weight [outputs, inputs] -> [T, outputs]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PlainMatrix:
    """See `TorchMatrix`."""

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        self.weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
        self._product: Product = F.linear
        if batch_invariant:
            # Imported here, because most machines without a GPU have no Triton.
            from llama_core.execution.weight_formats.invariant_kernels import multiply_in_order

            self._product = multiply_in_order

    @property
    def held(self) -> HeldWeights:
        return HeldWeights(self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def set_rows(self, first: int, weight: torch.Tensor | GroupedWeight) -> None:
        assert isinstance(weight, torch.Tensor), "the weight plan expands weights in plain matrices"
        self.weight[first : first + len(weight)].copy_(weight)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight)


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """See `WeightFormat`. The native engine has no kernels called float16."""

    name: str
    bytes_per_weight: float
    torch_matrix: TorchMatrixType = PlainMatrix

    def native_rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()


BFLOAT16 = PlainFormat("bfloat16", 2)
FLOAT16 = PlainFormat("float16", 2)
FLOAT32 = PlainFormat("float32", 4)
