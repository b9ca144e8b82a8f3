"""compressed-tensors' files, as LLM Compressor writes them.

pack-quantized: weight_packed [outputs, inputs / 8] holds codes plus half their range, weight_zero_point [outputs / 8, groups]
likewise. int-quantized, float-quantized and naive-quantized: weight is int8 or float8_e4m3fn. weight_scale [outputs, groups].
"""

from collections.abc import Callable, Mapping
from typing import Final

from llama_core.files.hf.coded_layers import (
    Quantization,
    Rule,
    Served,
    block,
    check,
    group_size,
    matching,
    named,
    refusal,
)
from llama_core.files.hf.coding import SCALES, WORDS, Coding, Part
from llama_core.model.fields import Fields, shown

_FORMATS: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_ACTIVATIONS: Final = ("input_activations", "output_activations")  # see `Quantization.ignored`
_CACHE: Final = "kv_cache_scheme"
_CONFIG: Final[Served] = {
    "quant_method": (),
    "format": (*_FORMATS, "mixed-precision"),
    "config_groups": (),
    "ignore": (),
    "quantization_status": ("compressed", "frozen"),
    "global_compression_ratio": (),
    "version": (),
    "sparsity_config": (),
    _CACHE: (),
}
_GROUP: Final[Served] = {"targets": (), "weights": (), "format": _FORMATS} | dict.fromkeys(_ACTIVATIONS, ())
# By strategy: the outputs and inputs that share a scale.
_BLOCKS: Final[Mapping[str, Callable[[Fields], tuple[int, int]]]] = {
    "group": lambda weights: (1, group_size(weights)),
    "channel": lambda weights: (1, 0),
    "tensor": lambda weights: (0, 0),
    "block": lambda weights: block(weights, "block_structure"),
}
_WEIGHTS: Final[Served] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": tuple(_BLOCKS),
    "dynamic": (False,),
    "actorder": (False, "weight", "static", "group"),  # the first three: an order of calibration alone
    **dict.fromkeys(("group_size", "block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ()),
}


def read(config: Fields) -> Quantization:
    check(config, _CONFIG)
    if (sparsity := config.inner("sparsity_config")) is not None:
        check(sparsity, {"format": ("dense",)}, knows_all=False)
    if (groups := config.inner("config_groups")) is None:
        raise refusal(f"{config.source}: config_groups must have a group")
    targets: list[tuple[str, Coding | None]] = []
    ignored = [_CACHE] if _CACHE in config.given else []
    for name in groups.given:
        group = groups.inner(name) or Fields({}, groups.source)
        check(group, _GROUP)
        weights = group.inner("weights")
        coding = _coding(weights, group.text("format", config.text("format", ""))) if weights is not None else None
        targets += [(target, coding) for target in group.texts("targets") or ()]
        ignored += [field for field in _ACTIVATIONS if field in group.given]
    # A layer's own name goes before expressions, and these before the name of the class.
    targets.sort(key=lambda each: (each[0] == "Linear", each[0].startswith("re:")))
    targets[:0] = [(entry, None) for entry in config.texts("ignore") or ()]
    rules = tuple(_rule(target, coding, config.source) for target, coding in targets)
    return Quantization(rules, tuple(dict.fromkeys(ignored)))


def _rule(target: str, coding: Coding | None, source: str) -> Rule:
    if target == "Linear":
        return matching("", coding, source)
    return matching(target[3:], coding, source) if target.startswith("re:") else named(target, coding)


def _coding(weights: Fields, form: str) -> Coding:
    """form: of the files."""
    check(weights, _WEIGHTS)
    bits, kind, is_symmetric = weights.integer("num_bits"), weights.text("type", "int"), weights.flag("symmetric", True)
    strategy, is_packed, is_float = weights.text("strategy", "tensor"), form == "pack-quantized", kind == "float"
    forms = "naive-quantized", f"{kind}-quantized", *(() if is_float else ("pack-quantized",))
    if form not in forms or (is_float and (bits != 8 or not is_symmetric)):
        how = f"{'' if is_symmetric else 'a'}symmetric {kind} of {bits} bits in format {shown(form)}"
        raise refusal(f"{weights.source}: {how} is not supported")
    plain = Part("weight", ("F8_E4M3" if is_float else "I8",))
    zeros = Part("weight_zero_point", WORDS if is_packed else ("I8",), packed=0 if is_packed else None)
    is_scattered = strategy == "group" and weights.given.get("actorder") == "group"
    return Coding(
        bits if is_packed else 8,
        _BLOCKS[strategy](weights),
        Part("weight_packed", WORDS, packed=1) if is_packed else plain,
        Part("weight_scale", SCALES),
        None if is_symmetric else zeros,
        groups=Part("weight_g_idx", ("I32", "I64")) if is_scattered else None,
        shape=Part("weight_shape", ("I64", "I32")) if is_packed else None,
        zero=1 << (bits - 1) if is_packed else 0,
        is_symmetric=is_symmetric,
        is_float=is_float,
        is_scattered=is_scattered,
    )
