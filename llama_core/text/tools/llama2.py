"""Calls of Llama 2, which was not trained to call tools: a prompt of our own asks for them, in the system message.

The calls have the form of Hermes, so that text and calls can be told apart. The chat format
refuses messages with its own tags; in JSON they are written with an escape, so that calls, tools and results contain none.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from llama_core.text.tools.hermes import CLOSE, OPEN, HermesFormat
from llama_core.text.tools.tool import Call, Tool
from llama_core.text.tools.tool_format import json_lines

# The first characters of the chat format's tags. Some tokenizers fold case.
_TAG: Final = re.compile(r"\[(?=/?INST\])|<(?=</?SYS>>)", re.IGNORECASE)


class Llama2ToolFormat(HermesFormat):
    name = "llama2"
    marks = ()

    def recognizes_template(self, template: str) -> bool:
        return "<<SYS>>" in template

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "You can call functions to help with the user's request. These are the functions, one a line, as JSON:\n"
            f"{_escaped(json_lines(tools))}\n\n"
            "To call a function, write its name and its arguments in exactly this form, and nothing after it:\n"
            f'{OPEN}\n{{"name": "the function\'s name", "arguments": {{"an argument\'s name": "its value"}}}}\n{CLOSE}\n'
            "The next message then has the result. When no function helps, answer in plain text."
        )

    def written_calls(self, calls: Sequence[Call]) -> str:
        return _escaped(super().written_calls(calls))

    def written_result(self, name: str, content: str) -> str:
        text = _escaped(json.dumps(content, ensure_ascii=False)) if _has_tag(content) else content
        return f"Result of {name or 'the function'}:\n{text}"


def _has_tag(text: str) -> bool:
    """Whether the text has a tag, as it is written or as tokenizers read it that rewrite characters."""
    return bool(_TAG.search(text) or (not text.isascii() and _TAG.search(unicodedata.normalize("NFKC", text))))


def _escaped(text: str) -> str:
    """JSON text without the tags, which strings alone can have in JSON, by an escape of their first character."""
    if not _has_tag(text):
        return text
    if not text.isascii() and _TAG.search(unicodedata.normalize("NFKC", _TAG.sub("", text))):
        text = "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text)
    return _TAG.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
