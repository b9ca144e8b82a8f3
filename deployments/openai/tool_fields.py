"""The fields of a chat that concern tools, checked: OpenAI's `tools`, and the older `functions` in the same form.

Validators of our own, as in `schemas.py`: each names the first thing that is wrong, and none repeats what the client sent.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import from_json

from deployments.openai.parse_cost import MOST_IN_WORDS, takes_too_long
from llama_core.errors import InvalidParameter
from llama_core.text.tools.tool import Tool, ToolUse

MAX_TOOLS: Final = 128
MAX_CALLS_OF_MESSAGE: Final = 128
MAX_DESCRIPTION_CHARS: Final = 32 * 2**10
MAX_SCHEMA_CHARS: Final = 64 * 2**10  # as JSON text
MAX_TOOL_CHARS: Final = 512 * 2**10  # of all schemas and descriptions
MAX_SCHEMA_DEPTH: Final = 32
MAX_ID_CHARS: Final = 256
MAX_ARGUMENT_CHARS: Final = 2**20
MAX_CUT_OFF_CHARS: Final = 64 * 2**10  # of arguments that are completed, which is parsed once more
_NAME: Final = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")  # OpenAI allows 64 and fewer, the Model Context Protocol 128
_NAMES: Final = "must have 1 to 128 of the characters a-z, A-Z, 0-9, _, -, ., : and /"
_VALUES: Final = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_JSON_TYPES: Final = ("null", "boolean", "number", "integer", "string", "array")  # beside object


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """names: the tools that may be called; None for all. is_one: exactly one call."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    is_one: bool = False


def tool_use(
    tools: tuple[Tool, ...], choice: ChosenTools | None, parallel: bool | None, *, is_legacy: bool = False
) -> ToolUse | None:
    """The tools that the answer may call, or None for plain text. Raises InvalidParameter where choice and tools disagree.

    is_legacy: they are of the older fields `functions` and `function_call`, which errors name."""
    param, offered = ("function_call", "functions") if is_legacy else ("tool_choice", "tools")
    if not tools:
        if choice is not None and (choice.mode == "required" or choice.names):
            raise InvalidParameter.of(param, f"needs {offered}, of which the answer calls one")
        return None
    choice = choice or ChosenTools("auto")
    if choice.mode == "none":
        return None
    if choice.names is not None:
        known = {tool.name: tool for tool in tools}
        if not all(name in known for name in choice.names):
            raise InvalidParameter.of(param, f"must name a function that is among the {offered}")
        tools = tuple(known[name] for name in choice.names)
    return ToolUse(tools, choice.mode, parallel is not False and not choice.is_one)


def only_offered(tools: object, types: Collection[object]) -> object:
    """Of tools of other types, which this server cannot run, such as web search, the type alone: the model gets the others."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": tool.get("type")} if isinstance(tool, dict) and tool.get("type") not in types else tool
        for tool in tools
    ]


def _tools(value: object, field: str) -> tuple[Tool, ...]:
    """field: tools, or the older functions, which are no part of another object."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidParameter(f"must be a list of at most {MAX_TOOLS} {field}")
    tools = []
    for index, each in enumerate(value):
        where = f"[{index}]"
        if field == "tools":
            if not isinstance(each, dict) or each.get("type") != "function":
                raise InvalidParameter(
                    f"{where}: must be an object with type 'function'; other types are not supported"
                )
            each, where = each.get("function"), f"{where}.function"
        tools.append(_function(each, where, field))
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidParameter("each function must have a name of its own")
    if sum(len(tool.schema) + len(tool.description or "") for tool in tools) > MAX_TOOL_CHARS:
        raise InvalidParameter(f"all schemas and descriptions may have {MAX_TOOL_CHARS} characters together")
    return tuple(tools)


def _function(value: object, where: str, field: str) -> Tool:
    """where: the place within `field`."""
    if not isinstance(value, dict):
        raise InvalidParameter(f"{where}: must be an object with a name")
    name, description, strict = value.get("name"), value.get("description"), value.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(f"{where}.name: {_NAMES}")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS):
        raise InvalidParameter(f"{where}.description: must be a string of at most {MAX_DESCRIPTION_CHARS} characters")
    if not isinstance(strict, bool | None):
        raise InvalidParameter(f"{where}.strict: must be true or false")
    where += ".parameters"
    return Tool(name, description, _schema(value.get("parameters"), where), bool(strict), field + where)


def _schema(value: object, where: str) -> str:
    """JSON text of a schema that describes an object. Wrong words of types are left to the grammar."""
    value = {"properties": {}} if value in (None, []) else value  # PHP writes an empty object as a list
    if not isinstance(value, dict):
        raise InvalidParameter(f"{where}: must be a JSON schema of type object")
    if _depth(value) > MAX_SCHEMA_DEPTH:
        raise InvalidParameter(f"{where}: may be nested {MAX_SCHEMA_DEPTH} deep at most")
    schema = _without_nulls(value)
    kind = schema.get("type", "object")
    if isinstance(kind, list) and "object" in kind:
        schema["type"] = "object"
    elif kind in _JSON_TYPES or not isinstance(kind, str):
        raise InvalidParameter(f"{where}: must be a JSON schema of type object")
    if schema.get("properties") == []:
        schema["properties"] = {}
    names = schema.get("required", [])
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not isinstance(schema.get("properties", {}), dict) or not are_names:
        raise InvalidParameter(f"{where}: properties must be an object, and required a list of strings")
    text = json.dumps({"type": "object", **schema}, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidParameter(f"{where}: may have {MAX_SCHEMA_CHARS} characters at most")
    return text


def _without_nulls(schema: Any) -> Any:
    """A schema whose keywords that are null are absent, as Go and Java mean it."""
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: each for key, each in schema.items() if each is not None or key == "const"}
    return {key: each if key in _VALUES else _without_nulls(each) for key, each in kept.items()}


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, items), default=0)


def _tool_choice(value: object) -> ChosenTools:
    """OpenAI's forms: a word, a function by its name, or a list of allowed tools."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ChosenTools(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        if value.get("type") == "function" and isinstance(function := value.get("function"), dict):
            return ChosenTools("required", (_chosen(function),), is_one=True)
        allowed = value.get("allowed_tools")
        if value.get("type") == "allowed_tools" and isinstance(allowed, dict):
            return _allowed(allowed.get("mode"), allowed.get("tools"))
    raise InvalidParameter("must be none, auto, required, or an object that names a function or allowed_tools")


def _allowed(mode: object, tools: object) -> ChosenTools:
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidParameter("allowed_tools must have a mode, auto or required, and a list of tools")
    names = [_chosen(each.get("function") if isinstance(each, dict) else None) for each in tools]
    return ChosenTools("auto" if mode == "auto" else "required", tuple(dict.fromkeys(names)))


def _function_call(value: object) -> ChosenTools:
    """The older form of `tool_choice`."""
    if isinstance(value, str) and value in ("none", "auto"):
        return ChosenTools(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return ChosenTools("required", (_chosen(value),), is_one=True)
    raise InvalidParameter("must be none, auto, or an object that names a function")


def _chosen(function: object) -> str:
    """The name of a chosen function."""
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(f"the function's name {_NAMES}")
    return name


def _tool_calls(value: object) -> list[dict[str, Any]]:
    """The calls of an assistant's message, in OpenAI's form without other fields."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_CALLS_OF_MESSAGE:
        raise InvalidParameter(f"must be a list of at most {MAX_CALLS_OF_MESSAGE} calls")
    calls = []
    for index, each in enumerate(value):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(each, dict) or not isinstance(function, dict) or each.get("type", "function") != "function":
            raise InvalidParameter(f"[{index}]: must be an object with id, type 'function' and function")
        call_id = each.get("id") or ""
        if not isinstance(call_id, str) or len(call_id) > MAX_ID_CHARS:
            raise InvalidParameter(f"[{index}].id: must be a string of at most {MAX_ID_CHARS} characters")
        calls.append({"id": call_id, "type": "function", "function": called(function, f"[{index}].function")})
    return calls


def called(function: dict[str, Any], where: str) -> dict[str, str]:
    """Name and arguments of an earlier call. An object that `max_tokens` cut off is completed. Other arguments stay text: one
    mistake of a model must not refuse all later turns."""
    name, arguments = function.get("name"), function.get("arguments")
    if arguments is None or isinstance(arguments, dict):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(f"{where}.name: {_NAMES}")
    if not isinstance(arguments, str) or len(arguments) > MAX_ARGUMENT_CHARS:
        raise InvalidParameter(f"{where}.arguments: must be JSON text of at most {MAX_ARGUMENT_CHARS} characters")
    if takes_too_long(arguments.encode("utf-8", "surrogatepass")):
        raise InvalidParameter(f"{where}.arguments: more than this server reads of one body, {MOST_IN_WORDS}")
    try:
        if json.loads(arguments.strip() or "null") is None:
            arguments = "{}"
    except (ValueError, RecursionError) as error:
        if isinstance(whole := _completed_json(arguments, error), dict):
            arguments = json.dumps(whole, ensure_ascii=False)
    return {"name": name, "arguments": arguments}


def _completed_json(text: str, error: Exception) -> object:
    """What JSON text has before its end was cut off; None where it is no beginning of JSON, or too long.

    error: of parsing it.
    """
    has_more = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
    if has_more or len(text) > MAX_CUT_OFF_CHARS:
        return None
    try:
        return from_json(text, allow_partial="trailing-strings", cache_strings="none")
    except (ValueError, TypeError):  # TypeError: lone surrogates, which only a handle can send
        return None


_FUNCTION_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
}
_TOOL_SCHEMA: Final = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION_SCHEMA},
    "required": ["type", "function"],
}
_CALL_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}}},
    },
    "required": ["function"],
}
_CHOICE_SCHEMA: Final = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}

Tools = Annotated[
    tuple[Tool, ...],
    PlainValidator(partial(_tools, field="tools")),
    WithJsonSchema({"type": "array", "items": _TOOL_SCHEMA, "maxItems": MAX_TOOLS}),
]
Functions = Annotated[
    tuple[Tool, ...],
    PlainValidator(partial(_tools, field="functions")),
    WithJsonSchema({"type": "array", "items": _FUNCTION_SCHEMA, "maxItems": MAX_TOOLS}),
]
Choice = Annotated[ChosenTools, PlainValidator(_tool_choice), WithJsonSchema(_CHOICE_SCHEMA)]
FunctionCall = Annotated[
    ChosenTools,
    PlainValidator(_function_call),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto"]}, {"type": "object"}]}),
]
ToolCalls = Annotated[
    list[dict[str, Any]], PlainValidator(_tool_calls), WithJsonSchema({"type": "array", "items": _CALL_SCHEMA})
]
