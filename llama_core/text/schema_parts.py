"""The keywords of JSON schemas that `schema_rules` knows, and which parts of a schema hold numbers of any length."""

from collections.abc import Mapping
from typing import Any, Final

# Keywords that say nothing of a value where they stand.
NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated", "$comment", "$schema", "$defs",
     "definitions", "x-guidance"}
)  # fmt: skip
OBJECT: Final = frozenset({"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"})
ARRAY: Final = frozenset({"type", "items", "prefixItems", "minItems", "maxItems"})
NUMBER_LIMITS: Final = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
NUMBER_FREE: Final = frozenset({"string", "boolean", "null", "integer"})


def is_number_free(schema: Any, refers: set[str]) -> bool:
    """Whether a text of the schema has no number but of limited length, if that holds for what it `refers` to.

    A definition that nothing refers to may be anything.
    """

    def all_free(schemas: Any) -> bool:
        return all(is_number_free(each, refers) for each in listed(schemas))

    if not isinstance(schema, dict):
        return schema is False
    if "const" in schema or "enum" in schema:
        return True
    keys = schema.keys() - NOTES
    if keys == {"$ref"} and isinstance(schema["$ref"], str):
        refers.add(schema["$ref"])
        return True
    if len(keys) == 1 and (composed := keys & {"anyOf", "oneOf", "allOf"}):
        return all_free(schema[composed.pop()])
    types = schema.get("type")
    if types == "array":
        return keys <= ARRAY and all_free([schema.get("items", True), *listed(schema.get("prefixItems", []))])
    if types == "object" and isinstance(schema.get("properties", {}), dict):
        parts = [schema.get("additionalProperties", True), *schema.get("properties", {}).values()]
        return keys <= OBJECT and all_free(parts)
    return types is not None and all(isinstance(each, str) and each in NUMBER_FREE for each in listed(types))


def definitions_with_numbers(root: Mapping[str, Any]) -> set[str]:
    """References to definitions that may hold a number of any length, also by way of others."""
    referrers: dict[str, set[str]] = {}
    found: set[str] = set()
    for kind in ("$defs", "definitions"):
        schemas = root.get(kind)
        for key, schema in schemas.items() if isinstance(schemas, dict) else ():
            name, refers = f"#/{kind}/{key}", set[str]()
            if not is_number_free(schema, refers):
                found.add(name)
            for each in refers:
                referrers.setdefault(each, set()).add(name)
    unread = list(found)
    while unread:
        new = referrers.get(unread.pop(), set()) - found
        found |= new
        unread += new
    return found


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
