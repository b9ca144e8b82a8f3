"""The format of Hermes and Qwen: each call is {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>.

Prompt and form as documented at https://github.com/NousResearch/Hermes-Function-Calling.
"""

from collections.abc import Sequence
from typing import Final

from llama_core.text.tools.lark import CallRules, MarkIds, text_before, tool_bodies
from llama_core.text.tools.parser import AnswerParser, EnvelopeParser
from llama_core.text.tools.tool import Call, Tool, ToolUse
from llama_core.text.tools.tool_format import ToolFormat, envelope, json_lines

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesFormat(ToolFormat):
    name = "hermes"
    marks: tuple[str, ...] = (OPEN, CLOSE)
    own_tokens = (OPEN,)

    def recognizes_template(self, template: str) -> bool:
        return OPEN in template

    def parser(self, use: ToolUse) -> AnswerParser:
        return EnvelopeParser(use.names, OPEN, closing=CLOSE)

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        opening, closing = marks.lark(OPEN), marks.lark(CLOSE)
        body, lines = tool_bodies(use, "arguments")
        triggered = ["head call"]
        if marks.is_control(OPEN):
            triggered.append(f"TEXT? {opening} call")
        return CallRules(
            first=f"{opening} call",
            triggered=tuple(triggered),
            following=f'"\\n"? {opening} call',
            definitions=(*text_before(use, OPEN), f'call: "\\n"? body "\\n"? {closing}', f"body: {body}", *lines),
        )

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{json_lines(tools)}\n</tools>\n\n"
            f"For each function call, return a json object with function name and arguments within {OPEN}{CLOSE} XML tags:\n"
            f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{OPEN}\n{envelope(call, 'arguments')}\n{CLOSE}" for call in calls)

    def written_result(self, name: str, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"
