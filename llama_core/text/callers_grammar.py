"""The form of a grammar that a caller of the handle gives in `SamplingParams.grammar`, checked before anything reads it."""

import json
from typing import Final

from llama_core.errors import InvalidParameter

# What the server itself writes beside "grammars", from a checked grammar (`grammar.described` and others).
_WRITTEN_BY_SERVER: Final = ("json_schema", "json_description", "begins_with_text", "unique_lists")


def callers_grammar(grammar: str) -> str:
    """The grammar in the form of `lark_grammar` and the other builders, which a text in Lark's notation gets here.

    Raises InvalidParameter that names `grammar`."""
    if not grammar.lstrip().startswith("{"):  # no rule of Lark begins so
        return json.dumps({"grammars": [{"lark_grammar": grammar}]})
    try:
        made = json.loads(grammar)
    except (ValueError, RecursionError):
        made = None
    if not (isinstance(made, dict) and _is_built(made)):
        raise InvalidParameter(
            "grammar: must be what json_schema_grammar, regex_grammar, choice_grammar or lark_grammar returns, or Lark",
            param="grammar",
        )
    return grammar


def _is_built(made: dict[str, object]) -> bool:
    grammars, lines = made.get("grammars"), made.get("gbnf_lines", [])
    return (
        isinstance(grammars, list)
        and bool(grammars)
        and all(isinstance(each, dict) for each in grammars)
        and isinstance(made.get("regex", ""), str)
        and isinstance(lines, list)
        and all(isinstance(line, int) for line in lines)
        and not any(name in made for name in _WRITTEN_BY_SERVER)
    )
