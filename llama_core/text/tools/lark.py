"""Puts the grammar of an answer together: reasoning, then text or calls. A format gives the rules of its calls.

The language is llguidance's variant of Lark (its docs/syntax.md): a lazy rule ends at the first place where it can, so text
ends where a call's trigger is complete.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_core.errors import InvalidParameter
from llama_core.text.tools.schema_grammar import kept_schema
from llama_core.text.tools.tool import ToolUse

SPACE: Final = r"[ \t\r\n]"
_TEXT: Final = "TEXT: /(?s:.+)/"


@dataclass(frozen=True, slots=True)
class CallRules:
    """The calls of one answer as bodies of rules. first: the only call or the first of several, where the answer must be calls.
    triggered: the first call after free text, as alternatives. following: each further call. end: behind the last one."""

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
        """A rule's item that matches `text`: the control token, or the characters."""
        token_id = self.control_ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def is_control(self, text: str) -> bool:
        return text in self.control_ids


@dataclass(frozen=True, slots=True)
class ThoughtRules:
    """The reasoning before the answer. begun: the prompt ends behind the opening mark."""

    opening: str
    closing: str
    begun: bool


def quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """`text` as part of a regular expression."""
    return "".join(char if char.isalnum() or char in ' _"<>' else f"\\{char}" for char in text)


def answer_grammar(
    rules: CallRules,
    use: ToolUse,
    marks: MarkIds,
    thought: ThoughtRules | None = None,
    *,
    spaced: bool = False,
    otherwise: str = "",
) -> str:
    """The source of the grammar. spaced: a space may come first, which the tokenizer drops from the text.

    otherwise: a rule's item that the answer may be instead of calls and nothing else, where `use` requires calls.
    """
    more = f" following{{0,{use.max_calls - 1}}}" if use.max_calls > 1 else ""
    lines: list[str] = []
    if use.mode == "required":
        calls = f"required{more} {rules.end}".rstrip()
        lines.append(f"answer: {calls} | {otherwise}" if otherwise else f"answer: {calls}")
        lines.append(f"required: {rules.first}")
    else:
        lines.append(f"answer: | TEXT | triggered{more} {rules.end}".rstrip())
        lines.append(f"triggered: {' | '.join(rules.triggered)}")
    if more:
        lines.append(f"following: {rules.following}")
    lines += [*rules.definitions, _TEXT]
    lines.append(_start(spaced))
    return "\n".join([*(["whole: answer"] if thought is None else _thought_lines(thought, marks)), *lines])


def reasoned_grammar(answer: str, thought: ThoughtRules, marks: MarkIds, *, spaced: bool = False) -> str:
    """The source of a grammar of reasoning and then `answer`, a rule's item."""
    return "\n".join([_start(spaced), *_thought_lines(thought, marks), f"answer: {answer}", _TEXT])


def _start(spaced: bool) -> str:
    return 'start: " "? whole' if spaced else "start: whole"


def _thought_lines(thought: ThoughtRules, marks: MarkIds) -> list[str]:
    # Models write a blank line between their reasoning and the answer.
    spaces = f"/{SPACE}{{0,4}}/"
    begun = f"thought {spaces} answer"
    start = begun if thought.begun else f"answer | {marks.lark(thought.opening)} {begun}"
    if marks.is_control(thought.closing):
        return [f"whole: {start}", f"thought: TEXT? {marks.lark(thought.closing)}"]
    return [f"whole: {start}", f"thought[lazy]: /(?s:.*){pattern(thought.closing)}/"]


def tool_bodies(use: ToolUse, key: str, *, opened: bool = False) -> tuple[str, list[str]]:
    """A rule's body that matches {"name": ..., KEY: {...}} of any tool, and the rules it needs.

    opened: behind `"name":`, for a grammar that has the other rules too.
    """
    prefix = "opened" if opened else "tool"
    names, lines = [], []
    for index, tool in enumerate(use.tools):
        head = quoted(f' "{tool.name}", "{key}": ') if opened else _head(tool.name, key)
        lines.append(f'{prefix}_{index}: {head} arguments_{index} "}}"')
        if not opened:
            lines.append(f"arguments_{index}: {schema_body(use, index)}")
        names.append(f"{prefix}_{index}")
    return " | ".join(names), lines


def _head(name: str, key: str) -> str:
    """{"name": ..., KEY: in the words of JSON, as a schema's rules divide it too: both may be alternatives."""
    words = ("{", '"name"', ":", f'"{name}"', ",", f'"{key}"', ":")
    return " ".join(quoted(word) + (' " "?' if word in ":," else "") for word in words)


def schema_body(use: ToolUse, index: int) -> str:
    """The schema of a tool's arguments as a rule's item. Raises InvalidParameter that names the place in the request."""
    tool = use.tools[index]
    try:
        return kept_schema(use.cache_scope, tool.schema, tool.strict, use.bounds_numbers)
    except InvalidParameter as error:
        param = tool_place(use, index) + (error.param or "")
        raise InvalidParameter(f"{param}: {error.message}", param=param) from None


def tool_place(use: ToolUse, index: int) -> str:
    """Where the request has the schema of a tool's arguments."""
    return use.tools[index].place or f"tools[{index}].function.parameters"


def arguments_grammar(use: ToolUse, indices: Sequence[int]) -> str:
    """A grammar of the arguments of any of these tools, and nothing else. Raises as `schema_body` does."""
    names = [f"arguments_{index}" for index in indices]
    rules = [f"{name}: {schema_body(use, index)}" for name, index in zip(names, indices, strict=True)]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([f"start: {' | '.join(names)}", *rules])}]})
