"""The arguments of a pythonic call as rules: NAME=VALUE in the order of the schema, each value by its own schema."""

import json
import re
from typing import Any, Final

from llama_core.errors import InvalidParameter
from llama_core.text.tools.lark import schema_body
from llama_core.text.tools.schema_grammar import kept_schema
from llama_core.text.tools.tool import ToolUse

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# Keywords that do not bind properties together. With any other, the arguments are one object.
_PLAIN: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs", "definitions",
     "$id", "$comment", "default", "examples"}
)  # fmt: skip
_REFERS_OUTSIDE: Final = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')
_LITERALS: Final = {"boolean": '("True" | "False")', "null": '"None"'}


def argument_rules(use: ToolUse, index: int) -> list[str]:
    """Rules; the first, `tool_INDEX`, matches everything behind "NAME(" with the closing parenthesis.

    Raises InvalidParameter that names the tool whose schema cannot be compiled.
    """
    tool = use.tools[index]
    whole = schema_body(use, index)  # to refuse what no grammar can say
    schema: dict[str, Any] = json.loads(tool.schema)
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    as_object = [f'tool_{index}: "**" {whole} ")"']
    if not (
        schema.keys() <= _PLAIN and set(required) <= properties.keys() and all(map(_IDENTIFIER.fullmatch, properties))
    ):
        return as_object
    if not properties:
        takes_any = schema.get("additionalProperties", True) is not False
        return [f'tool_{index}: ")"' + (f' | "**" {whole} ")"' if takes_any else "")]
    try:
        values = [_value(use, tool.strict, schema, each) for each in properties.values()]
    except InvalidParameter:
        return as_object
    return _sequence(index, list(properties), values, set(required))


def _sequence(index: int, names: list[str], values: list[str], required: set[str]) -> list[str]:
    """From argument `i` on, `first_i` before any argument and `more_i` behind one, which begins with a comma."""
    first, more = f"first_{index}", f"more_{index}"
    lines = [f"tool_{index}: {first}_0"]
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        lines.append(f'value_{index}_{i}: "{name}=" {value}')
        skip = "" if name in required else f" | {first}_{i + 1}"
        lines.append(f"{first}_{i}: value_{index}_{i} {more}_{i + 1}{skip}")
        skip = "" if name in required else f" | {more}_{i + 1}"
        lines.append(f'{more}_{i}: ", " value_{index}_{i} {more}_{i + 1}{skip}')
    return [*lines, f'{first}_{len(names)}: ")"', f'{more}_{len(names)}: ")"']


def _value(use: ToolUse, is_strict: bool, schema: dict[str, Any], value: Any) -> str:
    """A property's schema as a rule's item, with the definitions of the whole schema."""
    if value is True:
        value = {}
    if not isinstance(value, dict) or _REFERS_OUTSIDE.search(json.dumps(value)):
        raise InvalidParameter("needs the whole schema")
    if value.keys() <= {"type", "description", "title", "default"} and value.get("type") in ("boolean", "null"):
        return _LITERALS[value["type"]]
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return kept_schema(use.cache_scope, json.dumps({**value, **definitions}), is_strict, use.bounds_numbers)
