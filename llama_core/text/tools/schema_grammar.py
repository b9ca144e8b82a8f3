"""JSON schemas of tools as parts of a grammar, and the reason where one cannot be.

llguidance compiles a schema (https://github.com/guidance-ai/llguidance, docs/json_schema.md). White space is what
`json.dumps` writes, or none, so arguments cannot grow by white space alone.
"""

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from llama_core.errors import InvalidParameter
from llama_core.text.schema_numbers import bounded_schema
from llama_core.text.schema_rules import Spacing, schema_rules

_SPACING: Final[dict[str, Any]] = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_RULES: Final = Spacing(header="", comma="/, ?/", colon="/: ?/", options=_SPACING)
_SCALARS: Final = ("string", "integer", "number", "boolean", "null")  # have no white space
_KEYS: Final = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
# Keywords that an error may name: other words of it may be the caller's.
_KEYWORDS: Final = frozenset(
    {"propertyNames", "if", "then", "else", "not", "uniqueItems", "contains", "minContains", "maxContains",
     "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
     "$dynamicRef", "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema"}
)  # fmt: skip
_NOTES: Final = frozenset(
    {"description", "title", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # name -> schema
_VALUES: Final = frozenset({"const", "enum", "required"})
_REASONS: Final = (
    ("Unknown format", "a string format is not supported in a strict schema: remove it, or set strict to false"),
    (
        "oneOf",
        "oneOf with alternatives that overlap is not supported in a strict schema: use anyOf, or set strict to false",
    ),
    ("regex", "a pattern is not a regular expression without look-around"),
    ("Unsatisfiable", "no value satisfies the schema"),
    ("Pointer", "a $ref names no part of the schema"),
    ("Resource", "a $ref must name a part of the same schema"),
    ("limit", "the schema is too large"),
)


@lru_cache(maxsize=512)
def compiled_schema(schema: str, is_strict: bool, bounds_numbers: bool = True) -> str:
    """The schema (JSON text) as an item of a rule in Lark. bounds_numbers: with numbers of a limited length (`schema_numbers`).

    A keyword that is not supported constrains nothing, unless `is_strict`. Raises InvalidParameter with the reason for a schema
    that cannot be compiled.
    """
    body, problem = _compiled(schema, is_lenient=False, bounds_numbers=bounds_numbers)
    if problem and not is_strict:
        body, problem = _compiled(schema, is_lenient=True, bounds_numbers=bounds_numbers)
    if problem:
        raise InvalidParameter(_reason(problem))
    return body


def _compiled(schema: str, *, is_lenient: bool, bounds_numbers: bool) -> tuple[str, str]:
    """The item, and llguidance's problem with it, or ""."""
    from llguidance import LLMatcher  # loaded by the first request with a tool

    from llama_core.text.grammar import limits

    def problem_of(body: str) -> str:
        problem: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: {body}"), limits=limits())
        return "" if problem.startswith("WARNING") else problem

    given = _without_notes(json.loads(schema))
    options: dict[str, Any] = {} if given.get("type") in _SCALARS else dict(_SPACING)
    if is_lenient:
        options["lenient"] = True
    body = _as_schema(given, options)
    if (problem := problem_of(body)) or not bounds_numbers:
        return body, problem
    bounded = [_as_schema(bounded_schema(given), options)]
    if (rules := schema_rules(given, replace(_RULES, options=_SPACING | options))) is not None:
        bounded.insert(0, f"%lark {{\n{rules}\n}}")
    return next((each for each in bounded if not problem_of(each)), body), ""


def _as_schema(schema: dict[str, Any], options: dict[str, Any]) -> str:
    written = {**schema, "x-guidance": options} if options else schema
    return "%json " + json.dumps(written, separators=(",", ":"))


def _reason(problem: str) -> str:
    """The problem in words that repeat nothing of the schema but JSON schema's own."""
    if (keys := _KEYS.search(problem)) is not None:
        named = sorted(set(re.findall(r'"([^"]*)"', keys[1])) & _KEYWORDS)
        words = f"the keyword {', '.join(named)} is" if named else "a keyword is"
        return f"{words} not supported in a strict schema: remove it, or set strict to false"
    return next((words for mark, words in _REASONS if mark in problem), "is not a valid JSON schema")


def _without_notes(schema: Any) -> Any:
    """The schema without what only people read: descriptions of tools are long, and a grammar's size is limited."""
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "x-guidance":
            continue  # the caller does not set llguidance's options
        if key in _MAPS and isinstance(value, dict):
            kept[key] = {name: _without_notes(item) for name, item in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif key not in _NOTES:
            kept[key] = _without_notes(value)
    return kept
