"""The formats of Granite 3 and Phi-4-mini: <|tool_call|>, then a list of {"name": ..., "arguments": {...}}.

Granite 3.1 also writes <tool_call> before the list; Phi-4-mini functools, or <|/tool_call|> after it.
"""

from collections.abc import Sequence
from typing import Final

from llama_core.text.template.marked_text import MarkedText, concat
from llama_core.text.tools.lark import CallRules, MarkIds, text_before, tool_bodies
from llama_core.text.tools.parser import AnswerParser, EnvelopeParser
from llama_core.text.tools.tool import Call, Tool, ToolUse
from llama_core.text.tools.tool_format import ToolFormat, envelope, json_lines

OPEN: Final = "<|tool_call|>"
CLOSE: Final = "<|/tool_call|>"


class GraniteFormat(ToolFormat):
    name = "granite"
    marks: tuple[str, ...] = (OPEN,)
    own_tokens: tuple[str, ...] = (OPEN,)
    result_role = "tool_response"
    openings = (f"{OPEN}[", "<tool_call>[")
    closing = ""

    def recognizes_template(self, template: str) -> bool:
        return all(mark in template for mark in self.marks)

    def parser(self, use: ToolUse) -> AnswerParser:
        return EnvelopeParser(use.names, *self.openings, closing=self.closing)

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        body, lines = tool_bodies(use, "arguments")
        opened = f'{marks.lark(OPEN)} "[" body'
        return CallRules(
            first=opened,
            triggered=("head body", f"TEXT? {opened}") if marks.is_control(OPEN) else ("head body",),
            following='", " body',
            end='"]"' + (f" {marks.lark(self.closing)}?" if self.closing else ""),
            definitions=(*text_before(use, *self.openings), f"body: {body}", *lines),
        )

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            f"You may call one or more of these functions:\n{json_lines(tools)}\n"
            f"To call functions, answer with calls only, in this form:\n{self.written_calls([Call('name', '{}')])}"
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        listed = f"[{', '.join(envelope(call, 'arguments') for call in calls)}]"
        return concat((MarkedText.written(OPEN), listed, MarkedText.written(self.closing)))


class Phi4MiniFormat(GraniteFormat):
    name = "phi4_mini_json"
    marks = own_tokens = (OPEN, CLOSE)
    openings = (f"{OPEN}[", "functools[")
    closing = CLOSE
