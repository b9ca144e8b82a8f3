"""Llama 3.1's and 3.2's JSON format: the answer is {"name": ..., "parameters": {...}} and nothing else.

Prompt and form as Meta documents them (model cards and prompt formats, Llama 3.1, JSON based tool calling). <|python_tag|>
may come first, and "; " stands between several calls.
"""

import json
from collections.abc import Collection, Sequence
from typing import Final

from llama_core.text.tools.json_scan import CallHead, read_head, read_literal, skip_spaces
from llama_core.text.tools.lark import SPACE, CallRules, MarkIds, pattern, tool_bodies
from llama_core.text.tools.parser import AnswerParser, EnvelopeParser, LeadingCalls
from llama_core.text.tools.tool import Call, Tool, ToolUse, described
from llama_core.text.tools.tool_format import ToolFormat, envelope

PYTHON_TAG: Final = "<|python_tag|>"


class Llama3JsonFormat(ToolFormat):
    name = "llama3_json"
    marks = (PYTHON_TAG,)
    own_tokens = (PYTHON_TAG,)

    def recognizes_template(self, template: str) -> bool:
        return PYTHON_TAG in template or '"parameters": dictionary of argument name' in template

    def parser(self, use: ToolUse) -> AnswerParser:
        return Llama3JsonParser(use.names)

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        body, lines = tool_bodies(use, "parameters")
        definitions = [f"body: {body}", *lines]
        triggered = ["head rest"]
        if marks.is_control(PYTHON_TAG):
            triggered.append(f"{marks.lark(PYTHON_TAG)} body")
        if use.mode == "auto":
            rest, rest_lines = tool_bodies(use, "parameters", opened=True)
            kind = f'"type"{SPACE}*:{SPACE}*"function"{SPACE}*,{SPACE}*'
            definitions += [
                f'head[lazy]: /{SPACE}*({pattern(PYTHON_TAG)})?{SPACE}*\\{{{SPACE}*({kind})?"name"{SPACE}*:/',
                f"rest: {rest}",
                *rest_lines,
            ]
        return CallRules("body", tuple(triggered), '"; " body', definitions=tuple(definitions))

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "Given the following functions, please respond with a JSON for a function call with its proper arguments that "
            "best answers the given prompt.\n\n"
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
            "Do not use variables.\n\n" + "\n\n".join(json.dumps(tool, indent=4) for tool in described(tools))
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        return "; ".join(envelope(call, "parameters") for call in calls)


class Llama3JsonParser(LeadingCalls, EnvelopeParser):
    """Calls at the beginning of the answer only: any other answer is text, whatever braces it has."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, "", separators=";")

    def _leading(self, text: str, at: int) -> CallHead:
        if PYTHON_TAG.startswith(text[at : at + len(PYTHON_TAG)]):
            at = skip_spaces(text, read_literal(text, at, PYTHON_TAG)[1])
        return read_head(text, at, self._names)
