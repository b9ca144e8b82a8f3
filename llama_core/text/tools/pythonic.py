"""Llama 3.2's and 4's pythonic format: the answer is a list of calls, such as [f(a=1, b="x"), g()], and nothing else.

Prompt and form as Meta documents them (model cards and prompt formats, Llama 3.2, zero-shot function calling).
"""

import ast
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final, NoReturn

from llama_core.text.tools.json_scan import SPACES, CallHead, Miss, TooShort, behind, read_literal, skip_spaces
from llama_core.text.tools.lark import SPACE, CallRules, MarkIds, arguments, pattern, schema_item
from llama_core.text.tools.parser import AnswerParser, LeadingCalls
from llama_core.text.tools.pieces import Arguments
from llama_core.text.tools.tool import Call, Tool, ToolUse, described, parsed_arguments
from llama_core.text.tools.tool_format import ToolFormat

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_MAX_NAME: Final = 128
_SHORT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")  # of an argument that the grammar writes as NAME=
# Keywords that do not bind properties together. With any other, the arguments are one object.
_PLAIN: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs", "definitions",
     "$id", "$comment", "default", "examples"}
)  # fmt: skip
_REFERS_OUTSIDE: Final = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')
# In a literal of Python: what may end it, and what JSON writes otherwise.
_SPECIAL: Final = re.compile(r"""["'\\()\[\]{},]""")
_STRING_OR_NAME: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:True|False|None)\b')
_NAMES: Final = {"True": "true", "False": "false", "None": "null"}
_LITERALS: Final = {"boolean": '("True" | "False")', "null": '"None"'}


class PythonicFormat(ToolFormat):
    name = "pythonic"
    marks = ()

    def recognizes_template(self, template: str) -> bool:
        return "[func_name1(" in template

    def parser(self, use: ToolUse) -> AnswerParser:
        return PythonicParser(use.names)

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        names = [f"tool_{index}" for index in range(len(use.tools))]
        lines = [line for index in range(len(use.tools)) for line in _argument_rules(use, index)]
        calls = [f'"{tool.name}(" {rule}' for rule, tool in zip(names, use.tools, strict=True)]
        if use.mode == "auto":
            for index, tool in enumerate(use.tools):
                lines.append(f"head_{index}[lazy]: /{SPACE}*\\[{SPACE}*{pattern(tool.name)}\\(/")
        return CallRules(
            first='"[" body',
            triggered=tuple(f"head_{index} {rule}" for index, rule in enumerate(names)),
            following='", " body',
            end='"]"',
            definitions=(f"body: {' | '.join(calls)}", *lines),
        )

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "You are an expert in composing functions. You are given a question and a set of possible functions. Based on the "
            "question, you will need to make one or more function/tool calls to achieve the purpose. If none of the functions "
            "can be used, point it out.\n"
            "If you decide to invoke any of the function(s), you MUST put it in the format of "
            "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\n"
            "You SHOULD NOT include any other text in the response.\n"
            "Here is a list of functions in JSON format that you can invoke.\n\n"
            + json.dumps([tool["function"] for tool in described(tools)], indent=4, ensure_ascii=False)
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        return f"[{', '.join(_written(call) for call in calls)}]"


def _argument_rules(use: ToolUse, index: int) -> list[str]:
    """Rules; the first, `tool_INDEX`, matches everything after "NAME(" with the closing parenthesis: NAME=VALUE in the order of
    the schema, each value by its own schema."""
    tool = use.tools[index]
    schema: dict[str, Any] = json.loads(tool.schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    as_object = f'"**" {arguments(use, index)} ")"'
    names_all = isinstance(properties, dict) and isinstance(required, list) and set(required) <= properties.keys()
    if not (names_all and schema.keys() <= _PLAIN and all(map(_SHORT_NAME.fullmatch, properties))):
        return [f"tool_{index}: {as_object}"]
    if not properties:
        takes_any = schema.get("additionalProperties", True) is not False
        return [f'tool_{index}: ")"' + (f" | {as_object}" if takes_any else "")]
    if any(each is not True and not isinstance(each, dict) for each in properties.values()) or (
        _REFERS_OUTSIDE.search(json.dumps(properties))
    ):
        return [f"tool_{index}: {as_object}"]
    # From argument `i` on, `first_i` before any argument and `more_i` after one, which begins with a comma.
    first, more = f"first_{index}", f"more_{index}"
    lines = [f"tool_{index}: {first}_0"]
    for i, (name, value) in enumerate(properties.items()):
        lines.append(f'value_{index}_{i}: "{name}=" {_value(schema, value, is_strict=tool.strict)}')
        for before, comma in ((first, ""), (more, '", " ')):
            skip = "" if name in required else f" | {before}_{i + 1}"
            lines.append(f"{before}_{i}: {comma}value_{index}_{i} {more}_{i + 1}{skip}")
    return [*lines, f'{first}_{len(properties)}: ")"', f'{more}_{len(properties)}: ")"']


def _value(schema: dict[str, Any], value: dict[str, Any] | bool, *, is_strict: bool) -> str:
    """A property's schema as a rule's item, with the definitions of the whole schema."""
    value = value if isinstance(value, dict) else {}
    if value.keys() <= {"type", "description", "title", "default"} and value.get("type") in ("boolean", "null"):
        return _LITERALS[value["type"]]
    return schema_item(
        {**value, **{key: schema[key] for key in ("$defs", "definitions") if key in schema}}, is_strict=is_strict
    )


class PythonicParser(LeadingCalls):
    """Each argument becomes a part of a JSON object once its value is complete."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._num_arguments = 0
        self._value = ValueEnd()

    def _leading(self, text: str, at: int) -> CallHead:
        return self._named(text, behind(text, at, "["))

    def _next(self, text: str) -> CallHead | int:
        at = skip_spaces(text, 0)
        return at + 1 if text[at] == "]" else self._named(text, behind(text, at, ","))

    def _named(self, text: str, at: int) -> CallHead:
        """NAME( of a known tool."""
        found, end = read_literal(text, skip_spaces(text, at), *(f"{name}(" for name in self._names))
        return CallHead(end, found[:-1])

    def _begin(self, head: CallHead) -> None:
        super()._begin(head)
        self._num_arguments, self._value = 0, ValueEnd()
        self._pieces.append(Arguments("{"))

    def _arguments(self) -> bool:
        try:
            taken = self._argument(self._buffer)
        except TooShort:
            return False
        except Miss:  # no arguments of Python: what is there so far is the call
            self._close()
        else:
            self._buffer = self._buffer[taken:]
        return True

    def _argument(self, text: str) -> int:
        """The end of the next argument, which has been taken, or of the parenthesis."""
        at = skip_spaces(text, 0)
        if text[at] == ")":
            self._close()
            return at + 1
        if self._num_arguments:
            at = skip_spaces(text, behind(text, at, ","))
        return self._spread(text, at) if text[at] == "*" else self._keyword(text, at)

    def _keyword(self, text: str, at: int) -> int:
        """NAME=VALUE."""
        name = _NAME.match(text, at)
        if name is None:
            raise Miss
        begin = name.end()
        if begin == len(text):
            raise TooShort if begin - at < _MAX_NAME else Miss
        if text[begin] != "=":
            raise Miss
        end = self._value.find(text, begin + 1)
        if end is None:
            raise TooShort
        self._add(f"{json.dumps(name[0])}: {as_json(text[begin + 1 : end])}")
        return end

    def _spread(self, text: str, at: int) -> int:
        """**{...}, for names that are no identifiers."""
        _, begin = read_literal(text, at, "**")
        end = self._value.find(text, begin)
        if end is None:
            raise TooShort
        value = as_json(text[begin:end])
        if not value.startswith("{") or self._num_arguments:
            raise Miss
        self._add(value[1:-1].strip())
        return end

    def _add(self, argument: str) -> None:
        if argument:
            self._pieces.append(Arguments(("" if not self._num_arguments else ", ") + argument))
        self._num_arguments += 1
        self._value = ValueEnd()

    def _close(self) -> None:
        self._pieces.append(Arguments("}"))
        self._state = self._behind

    def _is_formal(self, rest: str) -> bool:
        return self._state == self._arguments or not rest.strip(SPACES + "]")


def _written(call: Call) -> str:
    arguments = parsed_arguments(call.arguments)
    if isinstance(arguments, str):
        return f"{call.name}({_literal(arguments)})"
    if all(_NAME.fullmatch(name) for name in arguments):
        return f"{call.name}({', '.join(f'{name}={_literal(value)}' for name, value in arguments.items())})"
    return f"{call.name}(**{_literal(arguments)})"


def _literal(value: Any) -> str:
    """As the grammar has it: True, False and None as in Python, everything else as JSON."""
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


class ValueEnd:
    """Finds the comma or the parenthesis after a value, a part at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._scanned = 0  # characters of the value that have been read

    def find(self, text: str, begin: int) -> int | None:
        """The position of what ends the value that begins at `begin`; None if it is not there yet."""
        at = begin + self._scanned
        while (match := _SPECIAL.search(text, at)) is not None:
            char, at = match[0], match.end()
            if char == "\\":
                if at == len(text):
                    self._scanned = match.start() - begin
                    return None
                at += 1
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                return match.start()
            else:
                self._depth += (char in "([{") - (char in ")]}")
        self._scanned = len(text) - begin
        return None


def as_json(value: str) -> str:
    """A literal of Python or JSON as JSON text. What is neither becomes a string."""
    written = _STRING_OR_NAME.sub(lambda match: _NAMES.get(match[0], match[0]), value.strip())
    try:
        json.loads(written, parse_constant=_refuse)
        return written
    except (ValueError, RecursionError):
        pass
    try:
        literal: Any = ast.literal_eval(value.strip())
        return json.dumps(literal, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(value.strip(), ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
