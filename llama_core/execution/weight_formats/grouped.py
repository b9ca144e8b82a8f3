"""Weights in groups of 32 inputs that share a scale, and in int4_min a minimum, both float16.

int8_groups is what GGUF calls Q8_0, int4 is Q4_0 and int4_min is Q4_1.
"""

from dataclasses import dataclass

import torch

from llama_core.execution.weight_formats.format import TorchMatrixType
from llama_core.execution.weight_formats.quantized_matrix import grouped_matrix


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """See `WeightFormat`. C++ computes the codes while it packs, or keeps those of the checkpoint."""

    name: str
    bytes_per_weight: float
    torch_matrix: TorchMatrixType

    def native_rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()


INT8_GROUPS = GroupedFormat("int8_groups", 1 + 2 / 32, grouped_matrix("int8_groups"))
INT4 = GroupedFormat("int4", 0.5 + 2 / 32, grouped_matrix("int4"))
INT4_MIN = GroupedFormat("int4_min", 0.5 + 4 / 32, grouped_matrix("int4_min"))
