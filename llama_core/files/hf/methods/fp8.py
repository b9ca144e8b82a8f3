"""The method fp8: weight is float8_e4m3fn, with weight_scale_inv for each block of outputs and inputs, or one scale.

The dtype of a weight shows whether it is quantized: models have dense output layers without saying so.
"""

from typing import Final

from llama_core.files.hf.coded_layers import Quantization, Served, block, check, matching, not_converted
from llama_core.files.hf.coding import SCALES, Coding, Part
from llama_core.model.fields import Fields

_SERVED: Final[Served] = {"fmt": ("e4m3",), "scale_fmt": ("float",)}


def read(config: Fields) -> Quantization:
    check(config, _SERVED, knows_all=False)
    has_blocks = "weight_block_size" in config.given
    name = "weight_scale_inv" if has_blocks else "weight_scale"
    scales = Part(name, SCALES, other_name="" if has_blocks else "weight_scale_inv")
    blocks = block(config, "weight_block_size") if has_blocks else (0, 0)
    coding = Coding(8, blocks, Part("weight", ("F8_E4M3",)), scales, is_float=True)
    dense = not_converted(config, "modules_to_not_convert", "ignored_layers")
    return Quantization((*dense, matching("", coding, config.source)), ("activation_scheme",))
