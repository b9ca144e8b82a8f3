"""GPTQ's files, as AutoGPTQ and GPTQModel write them.

qweight [inputs / 8, outputs], qzeros [groups, outputs / 8], scales [groups, outputs], g_idx [inputs]: the group of each input.
Version 1 stores zeros less one. GPTQModel subtracts the ones from whole words, with borrows between zeros.
"""

from typing import Final

from llama_core.files.hf.coded_layers import Quantization, Served, check, dynamic, group_size
from llama_core.files.hf.coding import SCALES, WORDS, Coding, Part
from llama_core.model.fields import Fields

# Other fields tell how the model was calibrated, or choose kernels.
_SERVED: Final[Served] = {
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "rotation": (False,),
}


def read(config: Fields) -> Quantization:
    return Quantization(tuple(dynamic(config, _coding)))


def _coding(config: Fields) -> Coding:
    check(config, _SERVED, knows_all=False)
    bits, group = config.integer("bits"), group_size(config)
    is_v2 = "gptq_v2" in (config.text("checkpoint_format", ""), config.text("format", ""))
    return Coding(
        bits,
        (1, group),
        codes=Part("qweight", WORDS, is_turned=True, packed=1),
        scales=Part("scales", SCALES, is_turned=True),
        zeros=Part("qzeros", WORDS, is_turned=True, packed=0),
        groups=Part("g_idx", ("I32", "I64")),
        word=0 if is_v2 else sum(1 << first for first in range(0, 32, bits)),
        is_symmetric=config.flag("sym", True),
        is_scattered=config.flag("desc_act") and group > 0,
    )
