"""Decides which structured answers may stand beside tool calls in one grammar.

The matcher divides text into the longest words that any alternative allows, so calls and the answer must differ in their first
words: the answer is a JSON object, and if calls are objects too, its keys are known; or no answer begins with the character
with which calls begin.
"""

from typing import TYPE_CHECKING, Any

from llama_core.errors import InvalidParameter
from llama_core.text.tools.json_scan import MAX_SPACES, SPACES
from llama_core.text.tools.tool import Call
from llama_core.text.tools.tool_format import ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher


def check_beside_calls(grammar: str, tool_format: ToolFormat, param: str) -> None:
    """Raises InvalidParameter that names `param` unless an answer of `grammar` can be told from a call of the format."""
    from llama_core.text.grammar import schema_of  # loads llguidance

    schema = schema_of(grammar)
    if not isinstance(schema, dict) or schema.get("type") != "object":
        if (opening := _shared_opening(grammar, tool_format)) is not None:
            raise InvalidParameter(
                f"{param}: beside tools that the model may call, it must be a JSON schema of type object, or allow no answer "
                f"that begins with {opening!r}, as calls do; with tool_choice none or required it may be any",
                param=param,
            )
        return
    if tool_format.written_calls([Call("f", "{}")]).startswith("{") and not _has_known_keys(schema):
        raise InvalidParameter(
            f"{param}: this model writes calls as JSON objects, so beside tools the schema must have additionalProperties "
            "false, no patternProperties, and not the properties name and parameters together",
            param=param,
        )


def _shared_opening(grammar: str, tool_format: ToolFormat) -> str | None:
    """A character with which both a call and an answer of the grammar may begin, behind white space."""
    from llguidance import LLMatcher, LLTokenizer  # loaded by the first request with a grammar

    from llama_core.text.grammar import limits

    matcher = LLMatcher(LLTokenizer("byte"), grammar, limits=limits(grammar))
    openings = (tool_format.written_calls([Call("f", "{}")])[0], *(mark[0] for mark in tool_format.marks))
    states = [matcher]
    for _ in range(MAX_SPACES + 1):
        for state in states:
            if (found := next((char for char in openings if _after(state, char)), None)) is not None:
                return found
        # One state for each last character: what may follow white space seldom depends on more of it.
        states = [
            after
            for space in SPACES
            if (after := next((after for state in states if (after := _after(state, space))), None)) is not None
        ]
    return None


def _after(matcher: "LLMatcher", char: str) -> "LLMatcher | None":
    """The matcher behind one character more; None where the grammar does not allow it."""
    copy = matcher.deep_copy()
    return copy if copy.try_consume_tokens([ord(char)]) else None


def _has_known_keys(schema: dict[str, Any]) -> bool:
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    composed = any(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref"))
    return is_closed and not composed and not {"name", "parameters"} <= set(schema.get("properties", {}))
