"""Strategies of hypothesis for JSON schemas with keywords that llguidance lacks, for values near them, and random answers."""

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher

from llama_core.execution.grammars.unique_items import UniqueItems

_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    1.5,
    "",
    "a",
    "b",
    "ab",
    [],
    [1],
    ["a", "b"],
    {},
    {"a": 1},
    {"a": "a", "b": 1},
]
LACKING = ("not", "not", "if", "oneOf", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties",
           "unevaluatedItems", "uniqueItems")  # fmt: skip
_NAMES = st.sampled_from("abc")
_COUNT = st.sampled_from([0, 1, 2, 2.0])
_LEAVES = st.sampled_from(
    [True, False, {}, {"type": "string"}, {"type": "integer"}, {"const": "a"}, {"const": 1}, {"const": True}]
)


def instances() -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from(_VALUES),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        ),
        max_leaves=5,
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Objects whose definitions are `x` and `y`."""
    inner = st.recursive(_LEAVES, _around, max_leaves=6)
    referring = _around(inner | _around(inner), refers=True)
    return st.builds(lambda root, x, y: root | {"$defs": {"x": x, "y": y}}, referring, inner, inner)


def _around(inner: st.SearchStrategy[Any], *, refers: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    by_name = st.dictionaries(_NAMES, inner, min_size=1, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(
            ["string", "number", "integer", "object", "array", ["string", "null"], ["object", "array"]]
        ),
        "enum": st.lists(st.sampled_from(_VALUES), min_size=2, max_size=3),
        "const": st.sampled_from(_VALUES),
        "pattern": st.sampled_from(["^a", "b$"]),
        "properties": by_name,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^[bc]$"]), inner, min_size=1, max_size=1),
        "required": st.lists(_NAMES, min_size=1, max_size=2, unique=True),
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "dependentRequired": st.dictionaries(_NAMES, st.lists(_NAMES, max_size=1), min_size=1, max_size=1),
        "dependentSchemas": st.dictionaries(_NAMES, inner, min_size=1, max_size=1),
        "uniqueItems": st.just(True),
        "format": st.just("color"),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), st.sampled_from([0, 1, 1.5])),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), several),
        **dict.fromkeys(
            ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"), st.just(False) | inner
        ),
        **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), inner),
    }
    if refers:
        keywords["$ref"] = st.sampled_from(["#/$defs/x", "#/$defs/y"])
    names = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True)
    if refers:
        names = st.builds(lambda chosen, lacking: [*chosen, lacking], names, st.sampled_from(LACKING))
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen}))


def random_answer(
    matcher: LLMatcher, draw: random.Random, max_bytes: int, unique: UniqueItems | None = None
) -> str | None:
    """A text of the grammar, byte by byte; None where it does not end in time. matcher: over the tokenizer of bytes. unique: of
    the grammar."""
    copy, text, unique = matcher.deep_copy(), bytearray(), unique and unique.copy()
    for _ in range(max_bytes):
        if copy.is_accepting() and (copy.is_stopped() or draw.random() < 0.5):
            return text.decode(errors="replace")
        mask = np.frombuffer(copy.compute_bitmask(), np.uint32).copy()
        if unique is not None:
            unique.narrow(mask, copy)
        bits = int.from_bytes(mask.tobytes(), "little")
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        closing = [byte for byte in allowed if chr(byte) in '"]}' and draw.random() < 0.4]
        plain = [byte for byte in allowed if 0x20 < byte < 0x7F and chr(byte) != "\\"]
        if not allowed:
            return None
        chosen = draw.choice(closing or plain or allowed)
        text.append(chosen)
        copy.consume_token(chosen)
        if unique is not None:
            unique.append([chosen])
    return None
