"""Answers that are either calls or another text, which their first character tells."""

from llama_core.text.tools.leading import LeadingParser
from llama_core.text.tools.pieces import Content
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import Tool, ToolUse


def _texts(*parts: str) -> list[str]:
    tool_format = find_tool_format("hermes")
    parser = LeadingParser(tool_format.parser(ToolUse((Tool("f"),))), "<")
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    return [piece.text for piece in pieces if isinstance(piece, Content)]


def test_white_space_that_arrives_first_stays_before_the_text() -> None:
    assert "".join(_texts(" ", " ", "abc", " d")) == "  abc d"
    assert "".join(_texts(" ", "\n")) == " \n"
