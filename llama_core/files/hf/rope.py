"""Reads the rotary embedding from config.json, as transformers 4 writes it (rope_theta, rope_scaling) and transformers 5
(rope_parameters)."""

import math
from dataclasses import replace
from typing import get_args

from llama_core.errors import ConfigError
from llama_core.model.config import MAX_SIZE
from llama_core.model.family import Family
from llama_core.model.fields import Fields, shown
from llama_core.model.rope import RopeConfig, RopeKind

_KNOWN = frozenset({
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned",
    "short_factor", "long_factor",
})  # fmt: skip


def read_rope(
    config: Fields, positions: int, head_dim: int, family: Family
) -> tuple[RopeConfig, RopeConfig | None, int]:
    """The rotary embedding, that of layers with a window where it is another one, and the model's context length.

    `positions`: max_position_embeddings, which includes the stretch for llama3 and longrope, and excludes it for linear and
    dynamic, unless layers with a window have a rotary embedding of their own. Raises ConfigError that names the field.
    """
    given = config.inner("rope_scaling") or config.inner("rope_parameters") or Fields({}, config.source)
    if not family.local_theta:
        rope, context = _partial_rope(config, given, positions, head_dim, family)
        return rope, None, context
    local = given.inner("sliding_attention") or Fields({}, given.source)
    if set(local.given) - {"rope_type", "rope_theta"} or local.text("rope_type", "default") != "default":
        raise given.fault("sliding_attention", "stretches the context, which is not supported")
    theta = local.number("rope_theta") or config.number(family.local_theta)
    has_types = bool(given.given.keys() & {"full_attention", "sliding_attention"})
    given = (given.inner("full_attention") or Fields({}, given.source)) if has_types else given
    rope, context = _partial_rope(config, given, positions, head_dim, family)
    return rope, RopeConfig(theta=theta or rope.theta, dim=rope.dim), min(context, positions)


def _partial_rope(
    config: Fields, given: Fields, positions: int, head_dim: int, family: Family
) -> tuple[RopeConfig, int]:
    rope, context = _whole_rope(config, given, positions, head_dim, family)
    share = given.number("partial_rotary_factor") or config.number("partial_rotary_factor") or 1.0
    if share > 1 or (share < 1 and "partial_rotary_factor" not in family.reads):
        raise ConfigError(f"{config.source}: partial_rotary_factor other than 1 is not supported")
    return replace(rope, dim=None if share == 1 else int(head_dim * share)), context


def _whole_rope(config: Fields, given: Fields, positions: int, head_dim: int, family: Family) -> tuple[RopeConfig, int]:
    if unknown := sorted(given.given.keys() - _KNOWN - family.reads.keys()):
        raise ConfigError(f"{given.source}: field {shown(unknown[0])} is not supported")
    theta = given.number("rope_theta") or config.number("rope_theta") or 10000.0
    RopeConfig(theta=theta).check(config.source)
    kind = given.text("rope_type", given.text("type", "default"))
    match family.rope_types.get(kind, kind):
        case "default":
            return RopeConfig(theta=theta), positions
        case "linear":
            factor = _factor(given)
            return RopeConfig("linear", theta, factor), _stretched(positions, factor)
        case "dynamic":
            factor = _factor(given)
            return RopeConfig("dynamic", theta, factor, positions), _stretched(positions, factor)
        case "llama3":
            return _llama3(config, given, theta, positions), positions
        case "yarn":
            rope = _yarn(config, given, theta, positions)
            assert rope.original_context is not None
            return rope, _stretched(rope.original_context, rope.factor)
        case "longrope":
            return _longrope(config, given, theta, positions, head_dim // 2), positions
        case _:
            raise ConfigError(
                f"{given.source}: rope type {shown(kind)} is not supported, only {', '.join(get_args(RopeKind))}"
            )


def _factor(given: Fields) -> float:
    factor = given.number("factor")
    if factor is None or factor < 1:
        raise given.wrong("factor", "a number of at least 1")
    return factor


def _stretched(positions: int, factor: float) -> int:
    return int(min(positions * factor, MAX_SIZE))


def _original_context(config: Fields, given: Fields, positions: int) -> int:
    """transformers prefers the field outside the rope parameters, and falls back to max_position_embeddings."""
    name = "original_max_position_embeddings"
    return config.integer(name, given.integer(name, positions))


def _llama3(config: Fields, given: Fields, theta: float, positions: int) -> RopeConfig:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if low is None or high is None:
        raise ConfigError(f"{given.source}: rope type llama3 needs low_freq_factor and high_freq_factor")
    return RopeConfig(
        "llama3",
        theta,
        _factor(given),
        _original_context(config, given, positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(config: Fields, given: Fields, theta: float, positions: int) -> RopeConfig:
    original = _original_context(config, given, positions)
    factor = _factor(given) if "factor" in given.given else max(1.0, positions / original)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=given.number("beta_fast") or 32.0,
        beta_slow=given.number("beta_slow") or 1.0,
        truncate=given.flag("truncate", True),
        attention_factor=_attention_factor(given, factor),
    )


def _longrope(config: Fields, given: Fields, theta: float, positions: int, pairs: int) -> RopeConfig:
    original = _original_context(config, given, positions)
    factor = given.number("factor") or positions / original
    multiple = given.number("attention_factor")
    if multiple is None:
        multiple = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeConfig(
        "longrope",
        theta,
        original_context=original,
        attention_factor=multiple,
        short_factor=given.numbers("short_factor", pairs),
        long_factor=given.numbers("long_factor", pairs),
    )


def _attention_factor(given: Fields, factor: float) -> float:
    """YaRN's multiple of cos and sin: 0.1 ln(factor) + 1, or a ratio of two such terms with factors of their own (mscale)."""
    if (attention_factor := given.number("attention_factor")) is not None:
        return attention_factor

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    above, below = given.number("mscale"), given.number("mscale_all_dim")
    return term(1.0) if above is None or below is None else term(above) / term(below)
