"""Builds grammars in the form that `llguidance.LLMatcher` reads: JSON with a list of grammars; the first is the answer's.

`check.py` finds out whether a grammar can be followed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llama_core.errors import InvalidParameter

# Between the parts of JSON: one space, or a new line with its indentation. Without a limit, a model may write spaces for ever.
JSON_OPTIONS: Final = {
    "whitespace_pattern": r"( |\n[ \t]{0,32})?",
    "item_separator": ",",
    "key_separator": ":",
}


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """JSON that the schema describes. Raises InvalidParameter where it is nested too deep."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}  # llguidance reads its options from an object
    return _of({"name": "json_schema", "json_schema": {**schema, "x-guidance": JSON_OPTIONS}})


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(regex: str) -> str:
    """Text that the regular expression matches as a whole. Rust's syntax, without look-around and back-references."""
    from llguidance import regex_to_lark

    return _of({"name": "regex", "lark_grammar": f"start: /{regex_to_lark(regex, '')}/"})


def choice_grammar(choices: Sequence[str]) -> str:
    """Exactly one of the texts."""
    return _of({"name": "choice", "lark_grammar": "start: " + " | ".join(map(json.dumps, choices))})


def lark_grammar(source: str) -> str:
    """A context-free grammar in Lark's notation or in GBNF, llama.cpp's."""
    return _of({"lark_grammar": source})


def callers_grammar(grammar: str) -> str:
    """A grammar that a caller of the handle gives: what one of the functions above has returned, or Lark."""
    return grammar if grammar.lstrip().startswith("{") else lark_grammar(grammar)  # no rule of Lark begins so


def schema_of(grammar: str) -> Any:
    """The JSON schema of `json_schema_grammar`; None of other grammars."""
    return json.loads(grammar)["grammars"][0].get("json_schema")


def joined(source: str, named: Mapping[str, str]) -> str:
    """The grammar in Lark of `source`, which refers to other grammars by their names: "@NAME"."""
    grammars: list[dict[str, Any]] = [{"name": "joined", "lark_grammar": source}]
    for name, grammar in named.items():
        first, *others = json.loads(grammar)["grammars"]
        grammars += [{**first, "name": name}, *others]
    return _of(*grammars)


def _of(*grammars: Mapping[str, Any]) -> str:
    try:
        return json.dumps({"grammars": grammars})
    except RecursionError:
        raise InvalidParameter("is nested too deep") from None
