"""Reads the rotary embedding from the metadata of a GGUF file, as llama.cpp does. Needs no torch."""

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from llama_core.errors import ConfigError
from llama_core.files.gguf.file import GgufTensor, Value
from llama_core.files.gguf.keys import GgufKeys
from llama_core.files.gguf.model import GgufModel
from llama_core.files.json_fields import shown
from llama_core.model_config import MAX_SIZE, RopeConfig

_TRAINED_CONTEXT = 8192  # of Llama 3, which the factors in its descendants' files stretch
_SCALING = "rope.scaling."
ROPE_FACTORS: Final = "rope_freqs.weight"  # the frequency of each pair is divided by it; no weight of a layer
_READ = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
_READ_BY_YARN = ("attn_factor", "yarn_attn_factor")
# Other keys below rope.scaling, with the values that mean no change. -1: llama.cpp's own choice.
_NEUTRAL: Final[Mapping[str, tuple[Value, ...]]] = {
    "attn_factor": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_ext_factor": (-1.0, 0.0),
    "yarn_log_multiplier": (0.0,),
}
_NEUTRAL_OF_YARN: Final = dict(_NEUTRAL) | {"yarn_ext_factor": (-1.0, 1.0)}


def read_rope(keys: GgufKeys, model: GgufModel, head_dim: int) -> tuple[RopeConfig, int | None]:
    """The rotary embedding, and the model's context length; None if the file does not say. Raises ConfigError that names the
    file and the key."""
    context = keys.integer("context_length", 0, least=0) or None
    rope = _rope(keys, model, head_dim, context)
    _refuse_unread(keys, is_yarn=rope.kind == "yarn")
    if rope.kind == "yarn" and context is not None:
        assert rope.original_context is not None
        if context <= rope.original_context:  # converters write the context before the stretch
            context = int(min(rope.original_context * rope.factor, MAX_SIZE))
    return rope, context


def _rope(keys: GgufKeys, model: GgufModel, head_dim: int, context: int | None) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    RopeConfig(theta=theta).check(str(model.path))
    kind = keys.value("rope.scaling.type")
    factors = model.tensors.get(ROPE_FACTORS)
    if factors is not None:
        for name in ("type", "factor"):
            if keys.value(_SCALING + name) not in (None, "none", 1.0):
                raise keys.fault(_SCALING + name, f"must be absent beside {ROPE_FACTORS}")
        return _llama3(model.path, factors, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)  # llama.cpp then ignores factors
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind in (None, "linear"):
        return RopeConfig(theta=theta) if factor == 1.0 else RopeConfig("linear", theta, factor)
    if kind != "yarn":
        raise keys.fault("rope.scaling.type", f"is {shown(kind)}; supported are none, linear and yarn")
    multiple = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_context=keys.integer("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=multiple * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def _refuse_unread(keys: GgufKeys, *, is_yarn: bool) -> None:
    """Raises ConfigError for a key below rope.scaling that would change the model, and that `_rope` does not read."""
    neutral = _NEUTRAL_OF_YARN if is_yarn else _NEUTRAL
    for name in sorted(keys.below(_SCALING)):
        short = name.removeprefix(_SCALING)
        is_read = short in _READ or (is_yarn and short in _READ_BY_YARN)
        value = keys.value(name)
        if not is_read and value not in neutral.get(short, ()):
            raise keys.fault(name, f"is {shown(value)}, which is not supported")


def _llama3(path: Path, tensor: GgufTensor, theta: float, head_dim: int) -> RopeConfig:
    """Llama 3.1's rotary embedding. The file holds the quotients of frequencies, not the factors from which they follow."""
    if tensor.encoding.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ConfigError(f"{path}: {ROPE_FACTORS} is {list(tensor.shape)} in {tensor.encoding.name}, expected "
                          f"{[head_dim // 2]} in F32")  # fmt: skip
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        stored: Sequence[float] = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    rope = RopeConfig("llama3", theta, max(stored), original_context=_TRAINED_CONTEXT)
    expected = _llama3_quotients(rope, head_dim) if math.isfinite(rope.factor) and rope.factor >= 1 else []
    if not expected or not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)):
        raise ConfigError(f"{path}: {ROPE_FACTORS} does not hold the factors of Llama 3.1's rotary embedding")
    return RopeConfig(theta=theta) if rope.factor == 1.0 else rope


def _llama3_quotients(rope: RopeConfig, head_dim: int) -> list[float]:
    """By how much the kind "llama3" slows each pair."""
    quotients = []
    for pair in range(head_dim // 2):
        turns = _TRAINED_CONTEXT / (2 * math.pi * rope.theta ** (2 * pair / head_dim))
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        quotients.append(1 / ((1 - kept) / rope.factor + kept))
    return quotients
