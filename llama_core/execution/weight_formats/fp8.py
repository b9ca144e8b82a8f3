"""Weights as 8-bit floating-point numbers (e4m3) with one scale for each output. GPUs alone compute with them."""

import torch

from llama_core.execution.weight_formats.quantized_matrix import Fp8Matrix


class Fp8Format:
    """See `WeightFormat`. The native engine has no kernels called fp8."""

    name = "fp8"
    bytes_per_weight = 1.0
    torch_matrix = Fp8Matrix

    def native_rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()


FP8 = Fp8Format()
