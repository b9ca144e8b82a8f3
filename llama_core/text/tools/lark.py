"""Parts of which a tool format makes the rules of its calls, in llguidance's variant of Lark (its docs/syntax.md).

A lazy rule ends at the first place where it can, so text ends where a call's trigger is complete.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llama_core.text.tools.tool import ToolUse

SPACE: Final = r"[ \t\r\n]"
# What `json.dumps` writes between the parts of JSON, or nothing: arguments cannot grow by white space alone.
_SPACING: Final = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
# What only people read: descriptions of tools are long, and the size of a grammar is limited.
_NOTES: Final = frozenset(
    {"description", "title", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly", "x-guidance"}
)
_SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES: Final = frozenset({"const", "enum", "required"})


@dataclass(frozen=True, slots=True)
class CallRules:
    """The calls of one answer as bodies of rules. first: the only call or the first of several, where the answer must be calls.
    triggered: the first call after free text, as alternatives. following: each further call. end: after the last one."""

    first: str
    triggered: tuple[str, ...]
    following: str
    end: str = ""
    definitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MarkIds:
    """How the vocabulary has the texts that formats write. control_ids: of those that are control tokens."""

    control_ids: Mapping[str, int] = field(default_factory=dict)

    def lark(self, text: str) -> str:
        """A rule's items that match `text`: its control tokens, and the other characters."""
        names = "|".join(map(re.escape, self.control_ids))
        parts = re.split(f"({names})", text) if names else [text]
        ids = self.control_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else quoted(part) for part in parts if part)

    def is_control(self, text: str) -> bool:
        """Whether a control token begins `text`."""
        return text.startswith(tuple(self.control_ids))


def quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """`text` as part of a regular expression."""
    return "".join(char if char.isalnum() or char in ' _"<>' else f"\\{char}" for char in text)


def text_before(use: ToolUse, *openings: str) -> list[str]:
    """The rule `head`: text up to one of the openings of a call, where the answer may be text."""
    return [f"head[lazy]: /(?s:.*)({'|'.join(map(pattern, openings))})/"] if use.mode == "auto" else []


def tool_bodies(use: ToolUse, key: str, *, opened: bool = False) -> tuple[str, list[str]]:
    """A rule's body that matches {"name": ..., KEY: {...}} of any tool, and the rules it needs.

    opened: after `"name":`, for a grammar that has the other rules too.
    """
    prefix = "opened" if opened else "tool"
    names, lines = [], []
    for index, tool in enumerate(use.tools):
        head = quoted(f' "{tool.name}", "{key}": ') if opened else _head(tool.name, key)
        lines.append(f'{prefix}_{index}: {head} arguments_{index} "}}"')
        if not opened:
            lines.append(f"arguments_{index}: {arguments(use, index)}")
        names.append(f"{prefix}_{index}")
    return " | ".join(names), lines


def _head(name: str, key: str) -> str:
    """{"name": ..., KEY: in the words into which a schema's grammar divides JSON too: both may be alternatives."""
    words = ("{", '"name"', ":", f'"{name}"', ",", f'"{key}"', ":")
    return " ".join(quoted(word) + (' " "?' if word in ":," else "") for word in words)


def arguments(use: ToolUse, index: int) -> str:
    """The schema of a tool's arguments as a rule's item."""
    tool = use.tools[index]
    return schema_item(json.loads(tool.schema), is_strict=tool.strict)


def schema_item(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """JSON of the schema as a rule's item. A keyword that llguidance lacks constrains nothing, unless `is_strict`."""
    options = _SPACING if is_strict else {**_SPACING, "lenient": True}
    return "%json " + json.dumps({**_without_notes(schema), "x-guidance": options}, separators=(",", ":"))


def _without_notes(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: _without_notes(item) for name, item in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif key not in _NOTES:
            kept[key] = _without_notes(value)
    return kept
