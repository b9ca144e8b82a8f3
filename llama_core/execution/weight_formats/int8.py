"""Weights as 8-bit integers with one scale for each output, which C++ computes while it packs."""

import torch

from llama_core.execution.weight_formats.quantized_matrix import Int8Matrix


class Int8Format:
    """See `WeightFormat`."""

    name = "int8"
    bytes_per_weight = 1.0
    torch_matrix = Int8Matrix

    def native_rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()


INT8 = Int8Format()
