"""Reads quantization_config of Hugging Face's config.json. Needs no torch."""

from collections.abc import Callable, Mapping
from typing import Final

from llama_core.files.hf.coded_layers import Quantization, refusal
from llama_core.files.hf.methods import awq, compressed_tensors, fp8, gptq
from llama_core.model.fields import Fields, shown

# By quant_method.
_METHODS: Final[Mapping[str, Callable[[Fields], Quantization]]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "mxfp4": lambda fields: Quantization(()),  # of experts alone, whose tensors' names say so
}


def read_quantization(config: Fields) -> Quantization | None:
    """How the weights are quantized, None if they are not. config: of config.json.

    Raises ConfigError that names what is not served, with the remedy.
    """
    quantization = config.inner("quantization_config")
    if quantization is None:
        return None
    method = quantization.text("quant_method", "unknown")
    if method not in _METHODS:
        what = f"weights quantized by {shown(method)} are not supported, only by {', '.join(_METHODS)}"
        raise refusal(f"{quantization.source}: {what}")
    return _METHODS[method](quantization)
