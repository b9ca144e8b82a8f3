"""What the grammar follows of the schemas of tools: one tool's schema that it cannot follow refuses no other tool."""

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from llama_core.errors import InvalidParameter
from llama_core.grammar.build import joined
from llama_core.grammar.check import checked
from llama_core.grammar.closed_objects import closed_objects
from llama_core.shared_cache import SharedCache
from llama_core.text.tools.lark import schema_item
from llama_core.text.tools.tool import Tool, ToolUse

log = logging.getLogger(__name__)

_FOLLOWED: Final = SharedCache[str](2**24)  # by scope: clients send the same tools with every request
_ANY_OBJECT: Final = '{"type": "object"}'
_PLACE_CHARS: Final = 200


def usable_tools(use: ToolUse, scope: str) -> ToolUse:
    """The tools with closed objects. A schema that cannot be followed becomes any object; where its tool is strict or a call
    is required, raises InvalidParameter that says where in the schema the fault is."""
    tools = []
    for index, tool in enumerate(use.tools):
        place, must = tool.place or f"tools[{index}].function.parameters", tool.strict or use.mode == "required"
        make = partial(_followed, replace(tool, place=place), must, scope)
        key = tool.schema, tool.strict, must
        tools.append(replace(tool, schema=_FOLLOWED.find_or_make(scope, key, make)))
    return replace(use, tools=tuple(tools))


def _followed(tool: Tool, must: bool, scope: str) -> str:
    schema = json.loads(tool.schema)
    followed = closed_objects(schema)
    if not (fault := _fault(followed, tool, scope)):
        return json.dumps(followed)
    if not must:
        log.warning("the arguments of tool %s may be any object: %s", tool.name, fault)
        return _ANY_OBJECT
    place = re.sub(r"[^\w.$-]", "?", _place(schema, fault, tool, scope))[-_PLACE_CHARS:]
    remedy = ", or set strict to false" if tool.strict else ""
    raise InvalidParameter(f"{tool.place}: {fault}{place and ', at '}{place}: change it{remedy}", param=tool.place)


def _fault(schema: Any, tool: Tool, scope: str) -> str:
    """Why the schema cannot be followed, or ""."""
    try:
        checked(joined(f"start: {schema_item(schema, is_strict=tool.strict)}", {}), "", scope)
    except InvalidParameter as error:
        return error.message.removeprefix(": ")
    return ""


def _place(schema: dict[str, Any], fault: str, tool: Tool, scope: str) -> str:
    """Of the innermost part of the schema that has the fault alone; "" where none has."""
    parts = list(_parts(schema, ""))
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def fault_of(begin: int, end: int) -> str:
        properties = {str(index): part for index, (_, part) in enumerate(parts[begin:end])}
        return _fault({**definitions, "type": "object", "properties": properties}, tool, scope)

    at = bisect_left(range(len(parts)), True, key=lambda index: bool(fault_of(0, index + 1)))
    return parts[at][0] if at < len(parts) and fault_of(at, at + 1) == fault else ""


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """All objects within the value with their places; inner ones come first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        inner = (f"{place}.{key}" if place else str(key))[-_PLACE_CHARS:]  # a long key would be in many places
        yield from _parts(each, inner)
        if isinstance(each, dict):
            yield inner, each
