"""The names of the weight formats. Loads no tensors."""

from typing import Final

# Values of the argument `quantization`; `matrices.py` has a line for each.
QUANTIZED: Final = ("int8", "int8_groups", "int4", "int4_min", "fp8")
# The formats in which 32 inputs of an output share a scale, and in some formats a minimum. A checkpoint may store them.
GROUPED: Final = ("int8_groups", "int4", "int4_min")
# "auto": as the checkpoint stores each matrix. "none": every matrix in the model's dtype.
QUANTIZATIONS: Final = ("auto", "none", *QUANTIZED)
