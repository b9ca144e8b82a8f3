"""The names of the weight formats. Loads no tensors."""

from typing import Final, Literal, get_args

# Of the argument `quantization`. "auto": as the checkpoint stores each matrix. "none": every matrix in the model's dtype.
Quantization = Literal["auto", "none", "int8", "int8_groups", "int4", "int4_min", "fp8"]
QUANTIZATIONS: Final[tuple[str, ...]] = get_args(Quantization)
QUANTIZED: Final = QUANTIZATIONS[2:]  # `matrices.py` has a line for each
# The formats in which 32 inputs of an output share a scale, and in some formats a minimum. A checkpoint may store them.
GROUPED: Final = ("int8_groups", "int4", "int4_min")
