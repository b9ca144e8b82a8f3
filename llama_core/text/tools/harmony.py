"""The format of gpt-oss: a message to functions.NAME on the channel `commentary`, whose text is the arguments.

Form as documented at https://github.com/openai/harmony. The model writes the recipient before the channel or after it;
`reasoning.MessageSplitter` makes one form of both.
"""

from collections.abc import Collection, Sequence
from typing import Final

from llama_core.text.template.marked_text import MarkedText, concat
from llama_core.text.tools.json_scan import CallHead, behind, read_literal, skip_spaces
from llama_core.text.tools.lark import CallRules, MarkIds, arguments, quoted, text_before
from llama_core.text.tools.parser import AnswerParser, EnvelopeParser
from llama_core.text.tools.tool import Call, Tool, ToolUse
from llama_core.text.tools.tool_format import ToolFormat, json_lines

START: Final = "<|start|>assistant"
CHANNEL: Final = "<|channel|>"
OPEN: Final = f"{CHANNEL}commentary to=functions."
JSON: Final = "<|constrain|>json"
MESSAGE: Final = "<|message|>"
CALL: Final = "<|call|>"


class HarmonyFormat(ToolFormat):
    name = "harmony"
    marks = ("<|start|>", CHANNEL, "<|constrain|>", MESSAGE, CALL)
    own_tokens = (CHANNEL, "<|constrain|>", CALL)

    def recognizes_template(self, template: str) -> bool:
        return f"{CHANNEL}commentary" in template

    def parser(self, use: ToolUse) -> AnswerParser:
        return HarmonyParser(use.names)

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        opening, constrain = marks.lark(OPEN), marks.lark("<|constrain|>")
        bodies, before, lines = [], [], []
        for index, tool in enumerate(use.tools):
            bodies.append(f"{quoted(tool.name)} kind arguments_{index}")
            before.append(f"{quoted(tool.name)} {marks.lark(CHANNEL + 'commentary')} kind arguments_{index}")
            lines.append(f"arguments_{index}: {arguments(use, index)}")
        first, triggered = f"{opening} body", ["head body"]
        if marks.is_control(CHANNEL):
            triggered.append(f"TEXT? {opening} body")
            first += ' | " to=functions." before'
            lines.append(f"before: {' | '.join(before)}")
        return CallRules(
            first=first,
            triggered=tuple(triggered),
            following=f"{marks.lark(CALL + START)} {opening} body",
            end=f"{marks.lark(CALL)}?",
            definitions=(
                *text_before(use, OPEN),
                f"body: {' | '.join(bodies)}",
                f'kind: (" "? {constrain}? "json")? {marks.lark(MESSAGE)}',
                *lines,
            ),
        )

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            f"# Tools\n\nYou may call one of these functions:\n{json_lines(tools)}\n"
            f"To call it, write its arguments in this form:\n{self.written_calls([Call('name', '{}')])}"
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        mark = MarkedText.written
        texts = [(mark(OPEN), call.name, mark(f" {JSON}{MESSAGE}"), call.arguments, mark(CALL)) for call in calls]
        return mark(START).join(map(concat, texts))


class HarmonyParser(EnvelopeParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, START + OPEN, OPEN, closing=CALL)
        kinds = ("", f" {JSON}", JSON, " json")
        self._heads = {f"{name}{kind}{MESSAGE}": name for name in names for kind in kinds}

    def _opening(self, text: str, at: int) -> CallHead:
        _, at = read_literal(text, at, *self._openings)
        head, at = read_literal(text, at, *self._heads)
        return CallHead(behind(text, at, "{") - 1, self._heads[head])

    def _next(self, text: str) -> int:
        return read_literal(text, skip_spaces(text, 0), CALL)[1]
