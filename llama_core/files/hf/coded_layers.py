"""Which linear layers of a model are quantized, and how, by their names; checks of a quantization_config. Needs no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import regex  # as `re`, with a time limit

from llama_core.errors import ConfigError
from llama_core.files.hf.coding import Coding
from llama_core.model.fields import Fields, shown

_REMEDY = "use the model's original weights, which the argument quantization quantizes while they load, or a GGUF file"
# A hostile file's expression may take exponential time to match a name, and exponential memory where repeats are nested.
_MATCH_SECONDS: Final = 1.0
_MAX_CHARS: Final = 10_000
_NESTED: Final = regex.compile(r"\)[*+]|\{")


@dataclass(frozen=True, slots=True)
class Rule:
    """How layers are stored whose names begin with what `pattern` matches; None: not quantized."""

    pattern: "regex.Pattern[str]"
    coding: Coding | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """rules: the first whose pattern matches counts. ignored: fields that quantize what is not a weight."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()

    def coding(self, layer: str) -> Coding | None:
        """Of a linear layer such as "model.layers.0.self_attn.q_proj"; None if it is not quantized. Raises ConfigError."""
        for rule in self.rules:
            try:
                if rule.pattern.match(layer, timeout=_MATCH_SECONDS):
                    return rule.coding
            except TimeoutError:
                pattern = shown(rule.pattern.pattern)
                raise ConfigError(f"quantization_config: {pattern} takes too long to match a name") from None
        return None


def named(name: str, coding: Coding | None = None) -> Rule:
    """Of the layer with this name."""
    return Rule(regex.compile(f"{regex.escape(name)}$"), coding)


def matching(expression: str, coding: Coding | None, source: str) -> Rule:
    """Of a regular expression; the empty one matches every layer. Raises ConfigError that names `source`."""
    if len(expression) > _MAX_CHARS or _NESTED.search(expression):
        raise ConfigError(f"{source}: {shown(expression)} is not supported: it is too long, or repeats a group")
    try:
        return Rule(regex.compile(expression), coding)
    except regex.error as error:
        raise ConfigError(f"{source}: {shown(expression)} is not a regular expression: {error}") from None


def not_converted(config: Fields, *names: str) -> list[Rule]:
    """Of lists as transformers and AutoAWQ have them: an entry is a regular expression of a part of a name between dots."""
    entries = [entry for name in names for entry in config.texts(name) or ()]
    return [matching(rf"(?:.*\.)?(?:{entry})(?:\.|$)", None, config.source) for entry in entries]


def dynamic(config: Fields, read: Callable[[Fields], Coding]) -> list[Rule]:
    """Of GPTQModel's `lm_head` and `dynamic`, whose entries are regular expressions with fields that differ, or after "-:" of
    layers that are not quantized; and of all other layers. read: the coding that fields describe."""
    rules = [] if config.flag("lm_head") else [named("lm_head")]
    entries = config.inner("dynamic")
    for name in entries.given if entries is not None else ():
        assert entries is not None
        changed = entries.inner(name)
        fields = Fields(config.given | (changed.given if changed else {}), f"{entries.source}: {shown(name)}")
        coding = None if name.startswith("-:") else read(fields)
        rules.append(matching(name.removeprefix("-:").removeprefix("+:"), coding, entries.source))
    return [*rules, matching("", read(config), config.source)]


def group_size(config: Fields) -> int:
    """0 for all inputs, which files write as -1."""
    return 0 if config.given.get("group_size") == -1 else config.integer("group_size")


def block(config: Fields, name: str) -> tuple[int, int]:
    """The outputs and inputs that share a scale."""
    sizes = config.given.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise config.wrong(name, "a list of two sizes")
    each = Fields({"outputs": sizes[0], "inputs": sizes[1]}, f"{config.source}: {name}")
    return each.integer("outputs"), each.integer("inputs")


# The values that are served of each field; () means any, because the field does not change what the weights mean.
Served = Mapping[str, tuple[object, ...]]


def check(fields: Fields, served: Served, *, knows_all: bool = True) -> None:
    """Raises ConfigError for another value, and if `served` has all fields that matter, for another field that is neither null
    nor empty."""
    for name, value in fields.given.items():
        if name not in served:
            if knows_all and value not in ({}, []):
                raise refusal(f"{fields.source}: {shown(name)} {shown(value)} is not supported")
        elif (allowed := served[name]) and not any(value == each and type(value) is type(each) for each in allowed):
            options = ", ".join(map(repr, allowed))
            raise refusal(f"{fields.source}: {name} {shown(value)} is not supported, only {options}")


def refusal(what: str) -> ConfigError:
    """The error for a quantization that is not served, with the remedy."""
    return ConfigError(f"{what}; {_REMEDY}")
