"""Reads the architecture from the metadata of a GGUF file, as llama.cpp does. Needs no torch; errors name file and key."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from llama_core.errors import ConfigError
from llama_core.files.gguf.file import GgufTensor, Value
from llama_core.files.gguf.model import GgufModel
from llama_core.model.config import MAX_LAYERS, MAX_SIZE, ModelConfig, num_rows
from llama_core.model.families import gguf_families
from llama_core.model.family import Family, Given
from llama_core.model.fields import Fields, shown
from llama_core.model.rope import RopeConfig

# Keys that change the model, with the values that mean no change.
_NEUTRAL: Final[dict[str, tuple[Value, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (0,),
    "use_parallel_residual": (False,),
}


class GgufKeys(Fields):
    """The metadata below the architecture's name. A list of equal values, one for each layer, counts as the value."""

    def __init__(self, model: GgufModel) -> None:
        self.architecture = model.metadata.get("general.architecture")
        begin = f"{self.architecture}."
        values = {key.removeprefix(begin): each for key, each in model.metadata.items() if key.startswith(begin)}
        for name, value in values.items():
            if isinstance(value, list) and 0 < len(value) <= MAX_LAYERS and all(each == value[0] for each in value):
                values[name] = value[0] if name != _PATTERN else value
        super().__init__(values, f"{model.path}: {self.architecture}")

    def family(self, path: Path) -> Family:
        """Raises ConfigError for an unknown one, and for keys that change the model and that it does not read."""
        has_experts = self.given.get("expert_count") not in (None, 0)
        family = gguf_families().get((str(self.architecture), has_experts))
        if family is None and not has_experts:
            known = ", ".join(dict.fromkeys(name for name, _ in gguf_families()))
            raise ConfigError(f"{path}: the architecture {shown(self.architecture)} is not supported, only {known}")
        if family is None:
            raise ConfigError(f"{path}: experts of the architecture {shown(self.architecture)} are not supported")
        for name, neutral in _NEUTRAL.items():
            value = self.given.get(name)
            if value is not None and name not in family.reads.values() and value not in neutral:
                raise self.fault(name, f"is {shown(value)}, which is not supported")
        return family

    def fault(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self.source}.{name} {what}")


_PATTERN: Final = "attention.sliding_window_pattern"
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def gguf_config(model: GgufModel, vocab_size: int) -> ModelConfig:
    """The architecture. vocab_size: the tokenizer's. Raises ConfigError that names the file and the key."""
    keys = GgufKeys(model)
    family = keys.family(model.path)
    heads = keys.integer("attention.head_count")
    dim = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", dim // heads or 1)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.fault("attention.value_length", f"must be the key length {head_dim}")
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and "partial_rotary_factor" not in family.reads:
        raise keys.fault("rope.dimension_count", f"must be the width {head_dim} of a head: others are not supported")
    layers = keys.integer("block_count", most=MAX_LAYERS)
    tensors = model.tensors
    rope, context = read_rope(keys, model, rotated, family)
    rope = replace(rope, dim=None if rotated == head_dim else rotated)
    if not family.defaults.get("rope_parameters", {}).get("truncate", True):
        rope = replace(rope, truncate=False)  # as the model was trained; llama.cpp truncates all
    local_rope = None
    if family.local_theta:
        default = rope.theta if family.local_theta == "rope_theta" else family.defaults[family.local_theta]
        local_rope = RopeConfig(theta=keys.number("rope.freq_base_swa") or default, dim=rope.dim)
    elif keys.given.get("rope.freq_base_swa", rope.theta) != rope.theta:
        raise keys.fault("rope.freq_base_swa", f"must be rope.freq_base {rope.theta}")
    read = {
        stored: (keys.given.get(name) or None) if name else family.defaults.get(stored)
        for stored, name in family.reads.items()
    }
    fields = Fields(read, str(model.path))
    qkv_bias, out_bias, mlp_bias = (f"blk.0.{name}.bias" in tensors for name in ("attn_q", "attn_output", "ffn_gate"))
    said = Given(rope, _windows(keys, layers, family), qkv_bias, out_bias, mlp_bias, fields, local_rope)
    if (eps := keys.number("attention.layer_norm_rms_epsilon")) is None:
        raise keys.fault("attention.layer_norm_rms_epsilon", "is missing")
    model_config = ModelConfig(
        dim=dim,
        n_heads=heads,
        n_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_dim=keys.integer("feed_forward_length"),
        vocab_size=_vocab_size(model, vocab_size),
        layers=tuple(family.layer(said, i) for i in range(layers)),
        norm_eps=eps,
        tied_embeddings=_OUTPUT not in tensors,
        context_length=context,
    )
    return replace(model_config, **family.model(fields)).check(str(model.path))


def stop_ids(model: GgufModel) -> frozenset[int]:
    """The ids of the tokens that end a text, a turn or a message. Raises ConfigError for one that is no id."""
    found: set[int] = set()
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        value = model.metadata.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            raise ConfigError(f"{model.path}: {key} must be a token's id, is {shown(value)}")
        found.add(value)
    return frozenset(found)


def _vocab_size(model: GgufModel, tokenizer_size: int) -> int:
    """Rows of the embedding, of which some models have more than tokens."""
    embedding = model.tensors.get(_EMBEDDING)
    if embedding is None:
        raise ConfigError(f"{model.path}: has no tensor {_EMBEDDING}: a file without a model's weights")
    return num_rows(embedding.shape[0], tokenizer_size, f"{model.path}: the number of rows of {_EMBEDDING}")


def _windows(keys: GgufKeys, layers: int, family: Family) -> tuple[int, ...]:
    """The window of each layer. Without a pattern in the file the family's applies, as in llama.cpp."""
    chunk = family.defaults.get("attention_chunk_size")  # in llama.cpp's code, not in the file
    if chunk is not None:
        for name in ("attention.sliding_window", _PATTERN):
            if (value := keys.given.get(name, chunk)) != chunk:
                raise keys.fault(name, f"is {shown(value)}, which is not supported")
        return tuple(-chunk if family.is_sliding(Fields(family.defaults, ""), i) else 0 for i in range(layers))
    window = keys.integer("attention.sliding_window", 0, least=0)
    pattern = keys.given.get(_PATTERN)
    has_pattern = "sliding_window_pattern" in family.defaults
    if pattern is None and not has_pattern:
        return (window,) * layers
    if has_pattern and (pattern is None or (isinstance(pattern, int) and pattern > 0)):
        of_layers = (
            dict(family.defaults)
            | {"num_hidden_layers": layers}
            | ({"sliding_window_pattern": pattern} if pattern else {})
        )
        fields = Fields(of_layers, keys.source)
        return tuple(window if family.is_sliding(fields, i) else 0 for i in range(layers))
    if not isinstance(pattern, list) or len(pattern) != layers or not all(isinstance(each, bool) for each in pattern):
        raise keys.fault(_PATTERN, f"must be {layers} truth values, one a layer")
    return tuple(window if has_window else 0 for has_window in pattern)


_TRAINED_CONTEXT = 8192  # of Llama 3, which the factors in its descendants' files stretch
_HIGH_FREQ_FACTORS: Final = (4.0, 1.0)  # of Llama 3 and 4
_SCALING = "rope.scaling."
ROPE_FACTORS: Final = "rope_freqs.weight"  # the frequency of each pair is divided by it
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS: Final = (ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)  # no weights of a layer
_READ = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
_READ_BY_YARN = ("attn_factor", "yarn_attn_factor")
# Other keys below rope.scaling, with the values that mean no change. -1: llama.cpp's own choice.
_NEUTRAL_SCALING: Final[Mapping[str, tuple[Value, ...]]] = {
    "attn_factor": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_ext_factor": (-1.0, 0.0),
    "yarn_log_multiplier": (0.0,),
}
_NEUTRAL_OF_YARN: Final = dict(_NEUTRAL_SCALING) | {"yarn_ext_factor": (-1.0, 1.0)}


def read_rope(keys: GgufKeys, model: GgufModel, rotated: int, family: Family) -> tuple[RopeConfig, int | None]:
    """The rotary embedding of so many values of a head, and the model's context length; None if the file does not say. Raises
    ConfigError that names the file and the key."""
    context = keys.integer("context_length", 0, least=0) or None
    rope = _rope(keys, model, rotated, context)
    _refuse_unread(keys, family, has_attention_factor=rope.kind in ("yarn", "longrope"))
    if rope.kind == "yarn" and context is not None:
        assert rope.original_context is not None
        if context <= rope.original_context:  # converters write the context before the stretch
            context = int(min(rope.original_context * rope.factor, MAX_SIZE))
    return rope, context


def _rope(keys: GgufKeys, model: GgufModel, rotated: int, context: int | None) -> RopeConfig:
    theta = keys.number("rope.freq_base") or 10000.0
    RopeConfig(theta=theta).check(str(model.path))
    kind = keys.given.get("rope.scaling.type")
    factors = model.tensors.get(ROPE_FACTORS)
    if factors is not None:
        for name in ("type", "factor"):
            if keys.given.get(_SCALING + name) not in (None, "none", 1.0):
                raise keys.fault(_SCALING + name, f"must be absent beside {ROPE_FACTORS}")
        return _llama3(model.path, _floats(model.path, factors, rotated), theta, rotated)
    if kind == "none":
        return RopeConfig(theta=theta)  # llama.cpp then ignores factors
    if _LONG_FACTORS in model.tensors and _SHORT_FACTORS in model.tensors:
        short, long = (_floats(model.path, model.tensors[name], rotated) for name in (_SHORT_FACTORS, _LONG_FACTORS))
        return RopeConfig(
            "longrope",
            theta,
            original_context=keys.integer("rope.scaling.original_context_length", context),
            attention_factor=(keys.number("rope.scaling.attn_factor") or 1.0),
            short_factor=short,
            long_factor=long,
        )
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    if kind in (None, "linear"):
        return RopeConfig(theta=theta) if factor == 1.0 else RopeConfig("linear", theta, factor)
    if kind != "yarn":
        raise keys.fault("rope.scaling.type", f"is {shown(kind)}; supported are none, linear and yarn")
    multiple = (keys.number("rope.scaling.attn_factor") or 1.0) * (keys.number("rope.scaling.yarn_attn_factor") or 1.0)
    stretch, log_multiplier = 0.1 * math.log(max(factor, 1.0)) + 1.0, keys.given.get("rope.scaling.yarn_log_multiplier")
    log_multiplier = log_multiplier if isinstance(log_multiplier, float) else 0.0
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_context=keys.integer("rope.scaling.original_context_length", context),
        beta_fast=(keys.number("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=(keys.number("rope.scaling.yarn_beta_slow") or 1.0),
        attention_factor=multiple * stretch / (log_multiplier * (stretch - 1.0) + 1.0),
    )


def _refuse_unread(keys: GgufKeys, family: Family, *, has_attention_factor: bool) -> None:
    """Raises ConfigError for a key below rope.scaling that would change the model, and that `_rope` does not read."""
    neutral = _NEUTRAL_OF_YARN if has_attention_factor else _NEUTRAL_SCALING
    for name in sorted(name for name in keys.given if name.startswith(_SCALING)):
        short = name.removeprefix(_SCALING)
        is_read = name in family.reads.values() or short in _READ or (has_attention_factor and short in _READ_BY_YARN)
        value = keys.given.get(name)
        if not is_read and value not in neutral.get(short, ()):
            raise keys.fault(name, f"is {shown(value)}, which is not supported")


def _floats(path: Path, tensor: GgufTensor, rotated: int) -> tuple[float, ...]:
    """A number for each pair, as a tensor holds them."""
    if tensor.encoding.name != "F32" or tensor.shape != (rotated // 2,):
        raise ConfigError(f"{path}: {tensor.name} is {list(tensor.shape)} in {tensor.encoding.name}, expected "
                          f"{[rotated // 2]} in F32")  # fmt: skip
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return struct.unpack(f"<{rotated // 2}f", file.read(tensor.num_bytes))


def _llama3(path: Path, stored: Sequence[float], theta: float, head_dim: int) -> RopeConfig:
    """The rotary embedding of Llama 3.1 or 4. The file holds the quotients of frequencies, not the factors from which they
    follow."""
    for high in _HIGH_FREQ_FACTORS:
        rope = RopeConfig("llama3", theta, max(stored), high_freq_factor=high, original_context=_TRAINED_CONTEXT)
        expected = _llama3_quotients(rope, head_dim) if math.isfinite(rope.factor) and rope.factor >= 1 else []
        if expected and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)):
            return RopeConfig(theta=theta) if rope.factor == 1.0 else rope
    raise ConfigError(f"{path}: {ROPE_FACTORS} does not hold the factors of Llama 3.1's or Llama 4's rotary embedding")


def _llama3_quotients(rope: RopeConfig, head_dim: int) -> list[float]:
    """By how much the kind "llama3" slows each pair."""
    quotients = []
    for pair in range(head_dim // 2):
        turns = _TRAINED_CONTEXT / (2 * math.pi * rope.theta ** (2 * pair / head_dim))
        between = rope.high_freq_factor - rope.low_freq_factor
        kept = (turns - rope.low_freq_factor) / between if between else float(turns > rope.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        quotients.append(1 / ((1 - kept) / rope.factor + kept))
    return quotients
