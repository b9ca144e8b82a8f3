"""Reads quantization_config of Hugging Face's config.json. One kind of quantized weights is served: compressed-tensors'
"pack-quantized" with 4 or 8 bits, symmetric, in groups of GROUP inputs. Needs no torch.
"""

from collections.abc import Mapping
from typing import Final

from llama_core.errors import ConfigError
from llama_core.files.source import GROUP
from llama_core.model.fields import Fields, shown

METHOD, PACKED = "compressed-tensors", "pack-quantized"
# Bits -> weight format of the same values.
FORMATS: Final[Mapping[int, str]] = {4: "int4", 8: "int8_groups"}
_REMEDY = "use the model's original weights, which the argument quantization quantizes while they load, or a GGUF file"

# The values that are served of each field; () means any, because the field does not change what the weights mean. A field
# that is not listed must be null or empty.
_Rules = Mapping[str, tuple[object, ...]]
_CONFIG_RULES: Final[_Rules] = {
    "quant_method": (METHOD,),
    "format": (PACKED,),
    "config_groups": (),
    "ignore": (),  # the files say which weights are packed
    "quantization_status": ("compressed", "frozen"),
    "global_compression_ratio": (),
    "version": (),
}
_GROUP_RULES: Final[_Rules] = {"targets": (["Linear"],), "weights": (), "format": (PACKED,)}
_WEIGHTS_RULES: Final[_Rules] = {
    "num_bits": tuple(FORMATS),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (GROUP,),
    "dynamic": (False,),
    "actorder": (False, "weight", "static"),  # an order of calibration alone; the others permute the inputs
    "observer": (),
    "observer_kwargs": (),
    "scale_dtype": (),
    "zp_dtype": (),
}
_REQUIRED: Final = ("num_bits", "group_size")


def packed_bits(config: Fields) -> int | None:
    """Bits of the packed weights, None for a model that is not quantized. config: of config.json.

    Raises ConfigError that names what is not served, with the remedy.
    """
    quantization = config.inner("quantization_config")
    if quantization is None:
        return None
    if (method := quantization.text("quant_method", "unknown")) != METHOD:
        raise ConfigError(f"{quantization.source}: weights quantized by {shown(method)} are not supported; {_REMEDY}")
    _check(quantization, _CONFIG_RULES)
    groups = quantization.inner("config_groups")
    if groups is None or len(groups.given) != 1:
        raise _refusal(f"{quantization.source}: config_groups must have one group")
    (name,) = groups.given
    group = groups.inner(name) if isinstance(groups.given[name], dict) else None  # a list names a preset
    weights = group.inner("weights") if group is not None else None
    if group is None or weights is None:
        raise _refusal(f"{groups.source}: {shown(name)} has no weights")
    _check(group, _GROUP_RULES)
    _check(weights, _WEIGHTS_RULES)
    for field in _REQUIRED:
        if field not in weights.given:
            raise _refusal(f"{weights.source}: field {field!r} is missing")
    return weights.integer("num_bits")


def _check(fields: Fields, rules: _Rules) -> None:
    for name, value in fields.given.items():
        if name not in rules:
            if value not in ({}, []):
                raise _refusal(f"{fields.source}: {shown(name)} {shown(value)} is not supported")
        elif (allowed := rules[name]) and not any(value == each and type(value) is type(each) for each in allowed):
            options = ", ".join(map(repr, allowed))
            raise _refusal(f"{fields.source}: {name} {shown(value)} is not supported, only {options}")


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"{what}; {_REMEDY}")
