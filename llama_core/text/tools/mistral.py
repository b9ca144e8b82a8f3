"""Mistral's formats: [TOOL_CALLS], then a list of {"name": ..., "arguments": {...}}, or NAME[ARGS]{...} for each call.

The newer models write the second form. The parser takes both.
"""

import json
from collections.abc import Collection, Sequence
from typing import Final

from llama_core.text.tools.json_scan import SPACES, CallHead, behind, read_literal, skip_spaces
from llama_core.text.tools.lark import CallRules, MarkIds, arguments, quoted, text_before, tool_bodies
from llama_core.text.tools.parser import AnswerParser, EnvelopeParser
from llama_core.text.tools.tool import Call, Tool, ToolUse, described
from llama_core.text.tools.tool_format import ToolFormat, envelope

OPEN: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"


class MistralFormat(ToolFormat):
    """The list."""

    name = "mistral"
    marks = (OPEN, ARGS)
    own_tokens: tuple[str, ...] = (OPEN,)

    def recognizes_template(self, template: str) -> bool:
        return OPEN in template

    def parser(self, use: ToolUse) -> AnswerParser:
        return MistralParser(use.names)

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        body, lines = tool_bodies(use, "arguments")
        opening = f'{marks.lark(OPEN)} " "? "["'
        return CallRules(
            first=f"{opening} body",
            triggered=_triggered(opening, ' " "? "["', marks),
            following='", " body',
            end='"]"',
            definitions=(*text_before(use, OPEN), f"body: {body}", *lines),
        )

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "You may call one or more of these functions:\n"
            f"[AVAILABLE_TOOLS] {json.dumps(described(tools), ensure_ascii=False)} [/AVAILABLE_TOOLS]\n"
            f"To call functions, answer with calls only, in this form:\n{self.written_calls([Call('name', '{}')])}"
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        return f"{OPEN} [{', '.join(envelope(call, 'arguments') for call in calls)}]"

    def written_result(self, name: str, content: str) -> str:
        return f"[TOOL_RESULTS] {content} [/TOOL_RESULTS]"


class MistralArgsFormat(MistralFormat):
    """NAME[ARGS]{...}."""

    name = "mistral_args"
    own_tokens = (OPEN, ARGS)

    def recognizes_template(self, template: str) -> bool:
        return OPEN in template and ARGS in template

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        opening = marks.lark(OPEN)
        names = [f"tool_{index}" for index in range(len(use.tools))]
        lines = [
            f"{rule}: {quoted(tool.name)} {marks.lark(ARGS)} {arguments(use, index)}"
            for index, (rule, tool) in enumerate(zip(names, use.tools, strict=True))
        ]
        return CallRules(
            first=f"{opening} body",
            triggered=_triggered(opening, "", marks),
            following=f"{opening} body",
            definitions=(*text_before(use, OPEN), f"body: {' | '.join(names)}", *lines),
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        return "".join(f"{OPEN}{call.name}{ARGS}{call.arguments}" for call in calls)


def _triggered(opening: str, after: str, marks: MarkIds) -> tuple[str, ...]:
    spelled = f"head{after} body"
    return (spelled, f"TEXT? {opening} body") if marks.is_control(OPEN) else (spelled,)


class MistralParser(EnvelopeParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, OPEN)
        self._is_list = True

    def _opening(self, text: str, at: int) -> CallHead:
        begin = skip_spaces(text, read_literal(text, at, OPEN)[1])
        self._is_list = text[begin] in "[{"
        if self._is_list:
            return super()._opening(text, at)
        # NAME[ARGS]{ of a known tool
        found, begin = read_literal(text, begin, *(name + ARGS for name in self._names))
        return CallHead(behind(text, begin, "{") - 1, found.removesuffix(ARGS))

    def _next(self, text: str) -> CallHead | int:
        return super()._next(text) if self._is_list else self._opening(text, skip_spaces(text, 0))

    def _is_formal(self, rest: str) -> bool:
        return not rest.strip(SPACES + "}]" if self._is_list else SPACES)
