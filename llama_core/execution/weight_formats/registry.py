"""The names of the weight formats. Each format is one line in a table here. Loads no tensors."""

from collections.abc import Mapping
from typing import Final

# Name -> object, which `format.find_weight_format` imports. `quantization: none` means the format in PLAIN with the name of the
# model's dtype. The formats in QUANTIZED are the other values of the argument `quantization`.
PLAIN: Final[Mapping[str, str]] = {
    "bfloat16": "llama_core.execution.weight_formats.plain:BFLOAT16",
    "float16": "llama_core.execution.weight_formats.plain:FLOAT16",
    "float32": "llama_core.execution.weight_formats.plain:FLOAT32",
}
QUANTIZED: Final[Mapping[str, str]] = {
    "int8": "llama_core.execution.weight_formats.int8:INT8",
}
QUANTIZATIONS: Final = ("none", *QUANTIZED)
