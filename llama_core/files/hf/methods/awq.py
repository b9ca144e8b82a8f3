"""AWQ's files for its "gemm" kernel, as AutoAWQ and GPTQModel write them.

qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs].
"""

from typing import Final

from llama_core.files.hf.coded_layers import Quantization, Served, check, dynamic, group_size, not_converted
from llama_core.files.hf.coding import SCALES, WORDS, Coding, Part
from llama_core.model.fields import Fields

# Other fields tell how the model was calibrated, or choose kernels.
_SERVED: Final[Served] = {
    "bits": (4,),
    "version": ("gemm", "GEMM"),
    "checkpoint_format": ("gemm",),
    "format": ("gemm",),
    "pack_dtype": ("int32",),
}
_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def read(config: Fields) -> Quantization:
    return Quantization((*not_converted(config, "modules_to_not_convert"), *dynamic(config, _coding)))


def _coding(config: Fields) -> Coding:
    check(config, _SERVED, knows_all=False)
    return Coding(
        config.integer("bits"),
        (1, group_size(config)),
        codes=Part("qweight", WORDS, is_turned=True, packed=0, order=_ORDER),
        scales=Part("scales", SCALES, is_turned=True),
        zeros=Part("qzeros", WORDS, is_turned=True, packed=0, order=_ORDER),
        is_symmetric=not config.flag("zero_point", True),
    )
