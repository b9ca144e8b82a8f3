"""Reads the architecture from Hugging Face's config.json, for each family in `model/families`.

What config.json does not say has the default of transformers' configuration class of its model_type.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from llama_core.errors import ConfigError
from llama_core.files.hf.quantization import read_quantization
from llama_core.files.hf.rope import read_rope
from llama_core.model.config import MAX_LAYERS, ModelConfig, num_rows
from llama_core.model.families import families, wrapped_families
from llama_core.model.family import Family, Given
from llama_core.model.fields import Fields, shown
from llama_core.model.operations import FULL_ATTENTION

_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"
_OF_WHOLE_MODEL: Final = ("quantization_config", "tie_word_embeddings")  # beside text_config

# Fields that change the model without changing its weights' names, and their values that change nothing.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "rope_interleaved": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "attn_temperature_tuning": (False,),
    "attention_chunk_size": (),
}


def model_from_config(config: Mapping[str, Any], *, vocab_size: int, source: str = "config.json") -> ModelConfig:
    """The fields of config.json. `vocab_size` is the number of the tokenizer's ids, which the embedding must cover.

    Raises ConfigError that names the field.
    """
    config = text_config(config, source)
    family = _family(Fields(config, source))
    given = Fields({**family.defaults, **config}, source)
    _refuse_unsupported(given, family)
    n_layers = given.integer("num_hidden_layers", most=MAX_LAYERS)
    n_heads = given.integer("num_attention_heads")
    dim = given.integer("hidden_size")
    if "head_dim" not in given.given and dim % n_heads:
        raise ConfigError(f"{source}: hidden_size {dim} is not divisible by num_attention_heads {n_heads}")
    head_dim = given.integer("head_dim", max(1, dim // n_heads))
    rope, local_rope, context = read_rope(given, given.integer("max_position_embeddings"), head_dim, family)
    attention_bias = given.flag("attention_bias")
    biases = attention_bias or family.qkv_bias, attention_bias, given.flag("mlp_bias")
    said = Given(rope, _windows(given, family, n_layers), *biases, given, local_rope)
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=given.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        hidden_dim=given.integer("intermediate_size"),
        vocab_size=num_rows(given.integer("vocab_size"), vocab_size, f"{source}: vocab_size"),
        layers=tuple(family.layer(said, i) for i in range(n_layers)),
        norm_eps=given.number("rms_norm_eps") or 1e-6,
        tied_embeddings=given.flag("tie_word_embeddings"),
        context_length=context,
    )
    return replace(model, **family.model(given)).check(source)


def text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """config.json as that of a language model: of a model with images the text_config, with what the whole model says of its
    weights."""
    given = Fields(config, source)
    family = wrapped_families().get(given.text("model_type", ""))
    if family is None:
        return config
    _check_architectures(given, "ForCausalLM", "ForConditionalGeneration")
    inner = given.inner("text_config") or Fields({}, source)
    model_type = inner.text("model_type", family.model_type)
    inner_family, wrapper = families().get(model_type), given.given["model_type"]
    if inner_family is None or wrapper not in inner_family.wrappers:
        raise inner.fault("model_type", f"is {shown(model_type)}, which is not supported inside {wrapper}")
    outer = {name: given.given[name] for name in _OF_WHOLE_MODEL if name in given.given}
    return {**(config["text_config"] if inner.given else {}), **outer, "model_type": model_type, "architectures": None}


def _family(given: Fields) -> Family:
    model_type = given.text("model_type", "")
    family = families().get(model_type)
    if family is None:
        known = ", ".join(sorted({*families(), *wrapped_families()}))
        raise ConfigError(f"{given.source}: model_type {shown(model_type)} is not supported, only {known}")
    _check_architectures(given, "ForCausalLM")
    return family


def _check_architectures(given: Fields, *endings: str) -> None:
    for architecture in given.texts("architectures") or ():
        if not architecture.endswith(endings):
            known = " and ".join(f"...{ending}" for ending in endings)
            raise ConfigError(f"{given.source}: architecture {shown(architecture)} is not supported, only {known}")


def _refuse_unsupported(given: Fields, family: Family) -> None:
    """Raises ConfigError for a field that asks for what this model does not compute."""
    for name, neutral in _NEUTRAL.items():
        if name in given.given and name not in family.reads and given.given[name] not in neutral:
            raise ConfigError(f"{given.source}: {name} {shown(given.given[name])} is not supported")
    for name in ("hidden_act", "hidden_activation"):
        if given.text(name, family.activations[0]) not in family.activations:
            raise ConfigError(f"{given.source}: {name} {shown(given.given[name])} is not supported")
    for name in ("attention_bias", "mlp_bias"):
        if given.flag(name) and name not in family.optional_bias:
            raise ConfigError(f"{given.source}: model_type {given.given['model_type']} has no {name}")
    read_quantization(given)


def _windows(given: Fields, family: Family, n_layers: int) -> tuple[int, ...]:
    """The window of each layer, negative for chunks. sliding_window null turns the family's default off."""
    has_chunks = "attention_chunk_size" in family.defaults
    local, name = (_CHUNKED, "attention_chunk_size") if has_chunks else (_SLIDING, "sliding_window")
    layer_types = given.texts("layer_types")
    if layer_types is not None and len(layer_types) != n_layers:
        raise ConfigError(f"{given.source}: layer_types has {len(layer_types)} entries for {n_layers} layers")
    for kind in layer_types or ():
        if kind not in (local, _FULL):
            raise ConfigError(f"{given.source}: layer type {shown(kind)} is not supported")
    is_on = "use_sliding_window" not in family.defaults or given.flag("use_sliding_window")
    has_windows = is_on and name in family.defaults and name in given.given
    if layer_types is None:
        layer_types = [local if has_windows and family.is_sliding(given, i) else _FULL for i in range(n_layers)]
    elif "layer_types" not in family.defaults and set(layer_types) != {local if has_windows else _FULL}:
        raise ConfigError(
            f"{given.source}: layer_types contradicts model_type {given.given['model_type']}, which has one window for all "
            "layers; if the layers alternate, the model_type is ministral"
        )
    if local not in layer_types:
        return (FULL_ATTENTION,) * n_layers
    if not has_windows:
        raise ConfigError(f"{given.source}: layer_types has layers of {local}, but there is no {name}")
    window = given.integer(name) * (-1 if has_chunks else 1)
    return tuple(window if kind == local else FULL_ATTENTION for kind in layer_types)
