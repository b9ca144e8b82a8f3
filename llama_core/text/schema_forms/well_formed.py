"""Whether a JSON value is a schema throughout: what is rewritten must not lose a part that is none, which is an error."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from llama_core.text.schema_places import NAMED_SCHEMAS, SCHEMA_LISTS, TYPES

_SCHEMAS: Final = frozenset(
    {"not", "if", "then", "else", "contains", "propertyNames", "additionalItems", "additionalProperties",
     "unevaluatedItems", "unevaluatedProperties"}
)  # fmt: skip
_LISTS: Final = frozenset({*SCHEMA_LISTS, "prefixItems"})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and float(value).is_integer()


def _is_limit(value: Any) -> bool:
    return _is_number(value) or isinstance(value, bool)  # a boolean in draft 4


def _is_type(value: Any) -> bool:
    return (
        value in TYPES if isinstance(value, str) else isinstance(value, list) and all(each in TYPES for each in value)
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_VALUES: Final[dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("minContains", "maxContains"), _is_count),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_limit),
    **dict.fromkeys(("$ref", "$dynamicRef", "pattern", "format"), _is_text),
    "type": _is_type,
    "required": _are_names,
    "enum": lambda value: isinstance(value, list),
    "uniqueItems": lambda value: isinstance(value, bool),
}


def is_well_formed(schema: Any) -> bool:
    """Whether the value and all schemas in it have known types, and keywords with values of the right kind."""
    remaining = [schema]
    while remaining:
        each = remaining.pop()
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict) or not all(_VALUES[key](each[key]) for key in _VALUES.keys() & each.keys()):
            return False
        for key, value in each.items():
            within = _within(key, value)
            if within is None:
                return False
            remaining += within
    return True


def _within(key: str, value: Any) -> list[Any] | None:
    """The schemas that a keyword has; None where it has other values."""
    if key in _SCHEMAS or (key == "items" and not isinstance(value, list)):
        return [value]
    if key in _LISTS or key == "items":
        return list(value) if isinstance(value, list) else None
    if key in NAMED_SCHEMAS:
        return list(value.values()) if isinstance(value, dict) else None
    if key == "dependentRequired":
        return [] if isinstance(value, dict) and all(map(_are_names, value.values())) else None
    if key == "dependencies":
        return list(_dependencies(value)) if isinstance(value, dict) else None
    return []


def _dependencies(value: dict[str, Any]) -> Iterator[Any]:
    return (each for each in value.values() if not _are_names(each))
