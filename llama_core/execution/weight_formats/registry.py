"""The names of the weight formats. Each format is one line in a table here. Loads no tensors."""

from collections.abc import Mapping
from typing import Final

# Name -> object, which `format.find_weight_format` imports. The formats in PLAIN have the name of the model's dtype. Those in
# QUANTIZED are values of the argument `quantization`.
PLAIN: Final[Mapping[str, str]] = {
    "bfloat16": "llama_core.execution.weight_formats.plain:BFLOAT16",
    "float16": "llama_core.execution.weight_formats.plain:FLOAT16",
    "float32": "llama_core.execution.weight_formats.plain:FLOAT32",
}
QUANTIZED: Final[Mapping[str, str]] = {
    "int8": "llama_core.execution.weight_formats.int8:INT8",
    "int8_groups": "llama_core.execution.weight_formats.grouped:INT8_GROUPS",
    "int4": "llama_core.execution.weight_formats.grouped:INT4",
    "int4_min": "llama_core.execution.weight_formats.grouped:INT4_MIN",
    "fp8": "llama_core.execution.weight_formats.fp8:FP8",
}
# The formats in which 32 inputs of an output share a scale, and in some formats a minimum. A checkpoint may store them.
GROUPED: Final = ("int8_groups", "int4", "int4_min")
# "auto": as the checkpoint stores each matrix. "none": every matrix in the model's dtype.
QUANTIZATIONS: Final = ("auto", "none", *QUANTIZED)
