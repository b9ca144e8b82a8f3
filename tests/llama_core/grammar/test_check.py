"""A grammar that cannot be followed is refused with llguidance's reason, and every check is bounded."""

import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest

from llama_core.errors import InvalidParameter
from llama_core.grammar import check
from llama_core.grammar.build import (
    callers_grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from llama_core.grammar.check import MAX_BYTES, checked

MARK = "Zq7Marker"


def reason(grammar: str) -> str:
    with pytest.raises(InvalidParameter) as refused:
        checked(grammar, "field")
    assert refused.value.param == "field" and refused.value.message.startswith("field: ")
    return refused.value.message.removeprefix("field: ")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, 'Unimplemented keys: ["if", "then"]'),
        ({"type": "array", "minItems": 2, "contains": {"pattern": MARK}}, 'Unimplemented keys: ["contains"]'),
        ({"type": MARK}, "Invalid type..."),
        ({"type": "string", "format": MARK}, "Unknown format..."),
        ({"$ref": f"#/$defs/{MARK}none"}, "Pointer ... does not exist"),
        ({"$ref": f"https://{MARK}.org/"}, "Resource ... is not present"),
        ({"type": "string", "pattern": f"{MARK}("}, "invalid regular expression: unclosed group"),
        ({"type": "string", "pattern": f"(?={MARK})"}, "invalid regular expression: look-around"),
        ({"type": "string", "minLength": MARK}, "Expected positive integer for 'minLength'..."),
        ({"type": "object", "patternProperties": {MARK: {}, ".": {}}}, "patternProperty regexes ... are not disjoint"),
        ({"properties": [MARK]}, "properties must be an object"),
        ({"type": "object", "properties": {MARK: False}, "required": [MARK]}, "Unsatisfiable schema: required property"),
        ({"type": "object", "properties": {MARK: {}}, "minProperties": 2}, "min/maxProperties only supported when"),
        ({"oneOf": [{"type": "string"}, {"pattern": MARK}]}, "oneOf constraints are not supported"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "Unsatisfiable schema: minimum (3) is greater than maximum (1)"),
        ({"type": "string", "pattern": f"{MARK}.*b", "minLength": 10**5}, "Unable to determine if regex is empty..."),
        ({"type": "string", "const": MARK, "pattern": "^a"}, "Unsatisfiable schema"),
        ({"$ref": "#"}, "no text follows it"),
        (False, "Unsatisfiable schema"),
    ],
)  # fmt: skip
def test_a_schema_is_refused_with_one_line_that_repeats_nothing_of_it(schema: Any, words: str) -> None:
    told = reason(json_schema_grammar(schema))
    assert told.startswith(words) and MARK not in told and "\n" not in told and len(told) <= 200


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex_grammar(f"({MARK}"), "invalid regular expression: unclosed group"),
        (regex_grammar(f"\\b{MARK}"), "invalid regex ..."),
        (regex_grammar("(a{1000}){1000}"), "lexer error: too many expressions constructed"),
        (lark_grammar(f"start: a\na: {MARK.lower()}"), "line 2, column 4: unknown name: ..."),
        (lark_grammar(f"start '{MARK}'"), "line 1, column 7: lexer error"),
        (lark_grammar(f'start "{MARK}"'), "line 1, column 7: Expected token"),
        (lark_grammar('start: %json {"uniqueItems": true}'), "line 1, column 8: Unimplemented keys"),
        (lark_grammar("start: s\ns: s"), "no text follows it"),
        (lark_grammar(f'root ::= "{MARK}'), "is not valid GBNF: Unexpected end of input at line 1"),
        (lark_grammar(f"root ::= {MARK}"), "is not valid GBNF: Rule ... not found"),
        (lark_grammar('root ::= "a\\'), "is not valid GBNF"),
        (lark_grammar("root ::= " + "(" * 5000), "is nested too deep"),
        (choice_grammar([MARK + str(i) for i in range(1600)]), "Parser Error: Current row has"),
        ("{}", "missing field"),
        ('{"grammars": 5}', "invalid type"),
        ('{"grammars": [{"lark_grammar": "root ::= x", "name": 5}]}', "is not valid GBNF"),
        (callers_grammar("\ud800"), "unexpected end of hex escape"),
        (json_schema_grammar({"minimum": float("nan")}), "expected value"),
        ("[" * MAX_BYTES + "]", f"must make a grammar of at most {MAX_BYTES} bytes"),
    ],
)
def test_other_grammars_are_refused_with_their_reason(grammar: str, words: str) -> None:
    told = reason(grammar)
    assert told.startswith(words) and MARK not in told and MARK.lower() not in told and "\n" not in told


def patterns(number: int, **beside: Any) -> dict[str, Any]:
    """An object of so many texts with a pattern each."""
    parts = {f"p{i}": {"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(number)}
    return {"type": "object", "properties": parts, **beside}


NEVER_TRIED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "multipleOf": 999983}, "the least common multiple"),
    ({"type": "integer", "multipleOf": 10**400}, "the least common multiple"),
    ({"anyOf": [{"multipleOf": 900 + i} for i in range(9)]}, "the least common multiple"),
    ({"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(20)]}, "with more than 12 patterns"),
    (patterns(13, anyOf=[patterns(1)]), "with more than 12 patterns"),
    ({"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(500)}}, "may have at most 100 pattern"),
]
LARK_NEVER_TRIED: list[tuple[str, str]] = [
    ("start: X\nX: " + " & ".join(f"/a.{{{i}}}/" for i in range(20)), "may have at most 8 operators"),
    ("start: X\nX: ~(" + " | ".join(f"~/a.{{{i}}}/" for i in range(20)) + ")", "may have at most 8 operators"),
    ('start: %json {"\\u006dultipleOf": 999983}', "the least common multiple"),
    ("\n".join(f"r{i} ::= r{i + 1}" for i in range(9000)), "in GBNF, the number of rules"),
    ('start: "a" s\ns: ' + "|".join(["t"] * 3000) + "\nt: " + "|".join(["s"] * 3000), "the references to each rule"),
    ('start: %json {"$defs": {"a": {"anyOf": [' + '{"$ref":"#/$defs/a"},' * 900 + "{}]}}}", "the number of all $ref"),
]


def test_a_multiple_of_true_is_refused() -> None:
    assert reason(json_schema_grammar({"multipleOf": True}))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [*((json_schema_grammar(each), words) for each, words in NEVER_TRIED)]
    + [(lark_grammar(each), words) for each, words in LARK_NEVER_TRIED],
)  # fmt: skip
def test_what_no_limit_bounds_is_refused_before_it_is_compiled(grammar: str, words: str) -> None:
    with patch.object(check, "in_background", side_effect=AssertionError):
        assert reason(grammar).startswith(words)


@pytest.mark.parametrize(
    "grammar",
    [
        *map(json_schema_grammar, (
            {"type": "object", "properties": {"a": {"multipleOf": 5}, "b": {"multipleOf": 0.01}, "c": {"multipleOf": 60}}},
            patterns(30),
            patterns(30, description="x", **{"$defs": {"n": {"$ref": "#/$defs/m"}, "m": {"type": "null"}}}),
            {"allOf": [{"type": "object"}, patterns(12)]},
            {"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(100)}},
        )),
        lark_grammar("start: " + " ".join('"a"~2' for _ in range(9))),
        lark_grammar("start: (WORD ws)+\nws: /[ ]/ | /[\\n]/\nWORD: " + " | ".join(f'"{i}"' for i in range(3000))),
        lark_grammar('start: KEY "&" /[&~]+/ // & ~ & ~ & ~ & ~ & ~ & ~\nKEY: /[a-z]+/ & ~("a" | "&&&&&&&&&&")'),
        lark_grammar('root ::= "\\U0001F600" [\\u0041-\\u005A] "\\\\u0041" | "::="'),
        choice_grammar(["AT&T ~ & ~ & ~ & ~ & ~ & ~", "::="]),
        callers_grammar('start: "x"'), callers_grammar(regex_grammar("x")), json_object_grammar(), json_schema_grammar(True),
    ],
)  # fmt: skip
def test_ordinary_grammars_that_look_alike_are_followed(grammar: str) -> None:
    checked(grammar, "field")


@pytest.mark.parametrize(
    "text", ["/\\" * 65_000, '"\\' * 45_000, "a" * 190_000, "x ::=" + '"\\' * 43_000, "\n " * 60_000]
)
@pytest.mark.timeout(60)
def test_text_without_end_takes_no_quadratic_time(text: str) -> None:
    assert reason(lark_grammar(text))  # squared, it would be minutes


def test_codes_of_gbnf_are_characters() -> None:
    from llguidance import LLMatcher, LLTokenizer

    grammar = checked(lark_grammar('root ::= "\\U0001F600" [\\u0041-\\u005A] "\\\\u0041"'), "field")
    text = "😀B\\u0041".encode()
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def test_a_long_chain_of_rules_does_not_end_the_process() -> None:
    """llguidance recurses from rule to rule: 2,700 of them overflow the stack of an ordinary thread."""
    source = """
from llama_core.grammar.answers import _check_beside_calls
from llama_core.grammar.build import json_schema_grammar, lark_grammar
from llama_core.grammar.check import checked
from llama_core.text.tools.hermes import HermesFormat
lark = "start: a0\\n" + "\\n".join(f"a{i}: a{i + 1}" for i in range(12000)) + '\\na12000: "x"'
definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(4000)}
checked(lark_grammar(lark), "field")
checked(json_schema_grammar({"$ref": "#/$defs/d0", "$defs": definitions | {"d4000": {}}}), "field")
_check_beside_calls(lark_grammar(lark), HermesFormat(), "field")
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def test_results_are_kept_for_each_scope_alone() -> None:
    good, bad = regex_grammar("kept [0-9]{1,3}"), regex_grammar("(kept")
    with patch.object(check, "_fault", side_effect=check._fault) as compiled:
        for scope in ("a", "b", "a", "b"):
            checked(good, "field", scope)
            with pytest.raises(InvalidParameter, match="other"):
                checked(bad, "other", scope)
    assert compiled.call_count == 4
