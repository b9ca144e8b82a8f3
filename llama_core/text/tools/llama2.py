"""Calls of Llama 2, which was not trained to call tools: a prompt of our own asks for them, in the system message.

docs/http.md has the prompt. The calls have the form of Hermes, so that text and calls can be told apart.
"""

from collections.abc import Callable, Sequence

from llama_core.text.tools.hermes import CLOSE, OPEN, HermesFormat
from llama_core.text.tools.tool import Tool
from llama_core.text.tools.tool_format import json_lines


class Llama2ToolFormat(HermesFormat):
    name = "llama2"
    marks = ()

    def recognizes_template(self, template: str) -> bool:
        return "<<SYS>>" in template

    def recognizes_vocabulary(self, has_token: Callable[[str], bool]) -> bool:
        return False

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "You can call functions to help with the user's request. These are the functions, one a line, as JSON:\n"
            f"{json_lines(tools)}\n\n"
            "To call a function, write its name and its arguments in exactly this form, and nothing after it:\n"
            f'{OPEN}\n{{"name": "the function\'s name", "arguments": {{"an argument\'s name": "its value"}}}}\n{CLOSE}\n'
            "The next message then has the result. When no function helps, answer in plain text."
        )

    def written_result(self, name: str, content: str) -> str:
        return f"Result of {name or 'the function'}:\n{content}"
