"""JSON schemas of tools as parts of a grammar, and the reason where one cannot be.

llguidance compiles a schema (https://github.com/guidance-ai/llguidance, docs/json_schema.md). White space is what
`json.dumps` writes, or none, so arguments cannot grow by white space alone.
"""

import json
from dataclasses import replace
from functools import partial
from typing import Any, Final

from llama_core.errors import InvalidParameter
from llama_core.shared_cache import SharedCache
from llama_core.text.schema_faults import negative_multiple, schema_fault
from llama_core.text.schema_forms.rewriting import original_place, refused_keywords, rewritten
from llama_core.text.schema_numbers import bounded_schema
from llama_core.text.schema_rules import Spacing, schema_rules

_SPACING: Final[dict[str, Any]] = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_RULES: Final = Spacing(header="", comma="/, ?/", colon="/: ?/", options=_SPACING)
_SCALARS: Final = ("string", "integer", "number", "boolean", "null")  # have no white space
_NOTES: Final = frozenset(
    {"description", "title", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)  # name -> schema
_VALUES: Final = frozenset({"const", "enum", "required"})

_KEPT: Final = SharedCache[str](2**24)


def kept_schema(scope: str, schema: str, is_strict: bool, bounds_numbers: bool) -> str:
    """`compiled_schema`, kept for later requests of the same scope."""
    make = partial(compiled_schema, schema, is_strict, bounds_numbers)
    return _KEPT.find_or_make(scope, (schema, is_strict, bounds_numbers), make)


def compiled_schema(schema: str, is_strict: bool, bounds_numbers: bool = True) -> str:
    """The schema (JSON text) as an item of a rule in Lark. bounds_numbers: with numbers of a limited length (`schema_numbers`).

    A keyword that is not supported, and without which no equal schema is found (`schema_forms`), constrains nothing, unless
    `is_strict`. Raises InvalidParameter with the reason for a schema that cannot be compiled; its `param` is the place within
    the schema.
    """
    given = _without_notes(json.loads(schema))
    if "multipleOf" in schema and (negative := negative_multiple(given)) is not None:
        raise InvalidParameter(negative.reason, param=negative.place)
    options: dict[str, Any] = {} if given.get("type") in _SCALARS else dict(_SPACING)
    body = _as_schema(given, options)
    problem = _problem_of(body)
    # Where numbers are not bounded, because the grammar was too large, a keyword that may be left out is not rewritten either.
    form = rewritten(given) if problem and (is_strict or bounds_numbers) else None
    if form is not None and (followed := _bounded(form, options)) is not None:
        return followed
    if problem and not is_strict:
        options["lenient"] = True
        body = _as_schema(given, options)
        problem = _problem_of(body)
    if problem:
        raise _refusal(given, options, problem, is_strict)
    return (_bounded(given, options) if bounds_numbers else None) or body


def _bounded(schema: dict[str, Any], options: dict[str, Any]) -> str | None:
    """The schema as an item, with numbers of a limited length; None where it cannot be followed so."""
    bounded = [_as_schema(bounded_schema(schema), options)]
    if (rules := schema_rules(schema, replace(_RULES, options=_SPACING | options))) is not None:
        bounded.insert(0, f"%lark {{\n{rules}\n}}")
    return next((each for each in bounded if not _problem_of(each)), None)


def _problem_of(body: str) -> str:
    """llguidance's problem with a rule's item, or ""."""
    from llguidance import LLMatcher  # loaded by the first request with a tool

    from llama_core.text.grammar import limits

    problem: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: {body}"), limits=limits())
    return "" if problem.startswith("WARNING") else problem


def _refusal(schema: dict[str, Any], options: dict[str, Any], problem: str, is_strict: bool) -> InvalidParameter:
    if left_problem := _problem_of(_as_schema(left := refused_keywords(schema), options)):
        problem = left_problem
    fault = schema_fault(left if left_problem else schema, problem, lambda part: _problem_of(_as_schema(part, options)))
    remedy = " in a strict schema: change it, or set strict to false" if is_strict and fault.is_lenient else ""
    return InvalidParameter(fault.reason + remedy, param=original_place(fault.place, schema))


def _as_schema(schema: dict[str, Any], options: dict[str, Any]) -> str:
    written = {**schema, "x-guidance": options} if options else schema
    return "%json " + json.dumps(written, separators=(",", ":"))


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
