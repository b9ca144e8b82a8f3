"""Structural tags in the newer form: each format accepts its texts and no others, and what is not supported is named."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from deployments.http.errors import Unsupported
from deployments.http.schemas import CompletionBody
from deployments.http.structural_tag import MAX_DEPTH, MAX_PARTS, structural_tag_grammar
from deployments.http.structured_outputs import checked, grammar_of
from llama_core.errors import InvalidParameter
from llama_core.text.grammar import IN_FULL, limits

BYTES = LLTokenizer("byte")
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "string"}},
    "required": ["x"],
    "additionalProperties": False,
}
ANY = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


THOUGHT = tag("<think>", ANY, "</think>")
CALLS = [
    tag("<f=a>", {"type": "json_schema", "json_schema": POINT}, "</f>"),
    tag("<f=b>", INTEGER, ["</f>", "</g>"]),
]


def triggered(**options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS, **options}


def separated(**options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": ", ", "tags": CALLS, **options}


def accepts(given: object, text: str) -> bool:
    grammar = checked("", IN_FULL, structural_tag_grammar(given, "p"), "p")
    matcher = LLMatcher(BYTES, grammar, limits=limits())
    taken = matcher.try_consume_tokens(list(text.encode()))
    return bool(taken == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        (const('say "hé\n\x7f"'), ['say "hé\n\x7f"'], ["", "say", 'say "hé\n\x7f"x']),
        (INTEGER, ["12", "-3"], ["", "1.5", '"1"']),
        ({"type": "json_schema", "json_schema": POINT}, ['{"x": 1, "y": "a"}', '{"x":1}'], ["{}", '{"x":  1}', "[]"]),
        ({"type": "json_schema", "json_schema": True}, ["1", "{}"], ["", "x"]),
        (regex("[A-Z]{2}/[0-9]+"), ["AB/7"], ["ab/7", "AB/", "AB/7x"]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["y", "xxy"], ["", "x"]),
        ({"type": "grammar", "grammar": 'start: "(" start? ")"'}, ["()", "(())"], ["(", "(()"]),
        (ANY, ["", "any\ntext <"], []),
        (ANY | {"excludes": ["no", "<"]}, ["", "n o"], ["no", "a<b"]),
        (ANY | {"max_chars": 3}, ["", "äöü"], ["abcd"]),
        (sequence(const("a"), const(""), regex("[0-9]*"), const("0")), ["a0", "a100"], ["a", "a1"]),
        (sequence(const("n: "), INTEGER, const(" ok")), ["n: 5 ok"], ["n: 5", "5 ok", "n: x ok"]),
        (either(const("a"), const("ab"), INTEGER), ["a", "ab", "7"], ["", "abc", "a7"]),
        (sequence(either(const("a"), INTEGER), const("b")), ["ab", "7b"], ["a", "b", "7"]),
        ({"type": "optional", "content": INTEGER}, ["", "1"], ["x"]),
        (sequence({"type": "optional", "content": const("a")}, const("b")), ["b", "ab"], ["a", "aab"]),
        ({"type": "star", "content": const("ab")}, ["", "abab"], ["a", "aba"]),
        (sequence({"type": "star", "content": regex("[a-z]")}, const("a")), ["a", "aaba"], ["", "ab"]),
        ({"type": "plus", "content": tag("(", INTEGER, ")")}, ["(1)", "(1)(2)"], ["", "(1)("]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 1.0, "max": 2.0, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": tag("", INTEGER, ";")}, ["1;2;", "1;2;3;"], ["1;"]),
        (sequence({"type": "repeat", "min": 0, "max": 0, "content": INTEGER}, const("a")), ["a"], ["1a"]),
        (THOUGHT, ["<think></think>", "<think>a </b\n</think>"], ["<think>", "<think></think>x", "a"]),
        (tag("[", ANY, ["]", "}"]), ["[a]", "[a}"], ["[a]]", "[a}b]"]),
        (tag("", const("a"), ""), ["a"], ["", "aa"]),
        (tag("<a>", sequence(INTEGER, ANY), "</a>"), ["<a>5 is </b</a>"], ["<a> 5</a>", "<a>5</a></a>"]),
        (sequence(THOUGHT, INTEGER), ["<think>1</think>2"], ["<think>1</think>", "2"]),
        (sequence(ANY, const("#"), INTEGER), ["a#1", "#1"], ["1", "a#", "a#b#1"]),
        (sequence(ANY, tag("<n>", INTEGER, "</n>")), ["<n>1</n>", "so <n>1</n>"], ["so", "<n>x</n>"]),
        (sequence(ANY, either(*CALLS)), ["<f=b>1</f>", 'it <f=a>{"x":1}</f>'], ["it", "<f=b>x</f>"]),
        (sequence(ANY, const("end")), ["end", "the end", "end end"], ["", "ended"]),
    ],
)  # fmt: skip
def test_a_format_accepts_its_texts(given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(given, text)] == []
    assert [text for text in wrong if accepts(given, text)] == []


A, B, G = '<f=a>{"x": 1}</f>', "<f=b>2</f>", "<f=b>2</g>"


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        (triggered(), ["", "text", A, f"so {A} and {B}{G} <f", "<f<f"], ["<f=c>", f"{A}<f=", "<f=b>x</f>", "<f=b>2"]),
        (triggered(at_least_one=True), [A, f"{B} and {A} that"], ["", "text", f" {A}"]),
        (triggered(stop_after_first=True), ["", "text", A, f"so {B}"], [f"{A} ", A + B]),
        (triggered(at_least_one=True, stop_after_first=True), [A, B, G], ["", f"so {A}", A + B]),
        (triggered(excludes=["!"]), ["a", f"a {A} b"], ["a!", f"{A}!"]),
        (tag("<a>", triggered(), "</a>"), ["<a></a>", f"<a>x{A}y</a>"], ["<a>", f"<a>{A}</a></a>"]),
        (sequence(THOUGHT, triggered()), ["<think>a</think>", f"<think>{A}</think>b{B}"], ["a", B]),
        (sequence(triggered(), const("#"), INTEGER), ["#1", f"a{A}#1"], ["a", f"{A}1"]),
        (separated(), ["", A, f"{A}, {B}", f"{G}, {A}, {A}"], [f"{A}, ", f"{A}{B}", f"a{A}", f"{A},{B}"]),
        (separated(at_least_one=True), [A, f"{A}, {B}"], [""]),
        (separated(stop_after_first=True), ["", A], [f"{A}, {B}"]),
        (separated(separator=""), ["", A + B], [f"{A}, {B}"]),
        (sequence(const("["), separated(), const("]")), ["[]", f"[{A}, {B}]"], ["[", f"[{A}, ]"]),
    ],
)
def test_tags_stand_in_free_text_or_between_separators(
    given: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(given, text)] == []
    assert [text for text in wrong if accepts(given, text)] == []


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
@pytest.mark.parametrize("as_text", [True, False])
def test_both_fields_take_a_format(field: str, as_text: bool) -> None:
    given: Any = {"type": "structural_tag", "format": THOUGHT}
    if field == "structured_outputs":
        given = {"structural_tag": json.dumps(given) if as_text else given}
    grammar, param = grammar_of(CompletionBody.model_validate({"prompt": "x", field: given}))
    assert param == ("response_format" if field == "response_format" else "structured_outputs.structural_tag")
    assert json.loads(grammar) == json.loads(structural_tag_grammar(THOUGHT, param))


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        (3, "format", "invalid_parameter"),
        ({"type": "poem"}, "format.type", "unsupported"),
        ({"type": "json_schema", "json_schema": {"multipleOf": -7}}, "format.json_schema.multipleOf", "invalid_parameter"),
        ({"type": "qwen_xml_parameter", "json_schema": POINT}, "format.type", "unsupported"),
        (sequence(const("a"), {"type": "token", "token": 3}), "format.elements[1].type", "unsupported"),
        (INTEGER | {"style": "glm_xml"}, "format.style", "unsupported"),
        (INTEGER | {"any_order": True}, "format.any_order", "unsupported"),
        (ANY | {"max_tokens": 5}, "format.max_tokens", "unsupported"),
        (tag("a", ANY, "b") | {"begin": {"type": "token", "token": 1}}, "format.begin", "unsupported"),
        (tag("a", {"type": "dispatch"}, "b"), "format.content.type", "unsupported"),
        (tag("a", ANY, [""]), "format.end", "invalid_parameter"),
        ({"type": "tag", "begin": "a", "content": ANY}, "format.end", "invalid_parameter"),
        ({"type": "const_string", "value": 3}, "format.value", "invalid_parameter"),
        (sequence(), "format.elements", "invalid_parameter"),
        (triggered(triggers=["<g"]), "format.tags[0].begin", "invalid_parameter"),
        (triggered(triggers=["<f", "<f="]), "format.tags[0].begin", "invalid_parameter"),
        (triggered(tags=["a"]), "format.tags[0]", "invalid_parameter"),
        (triggered(tags=[CALLS[0], regex("a")]), "format.tags[1]", "invalid_parameter"),
        (triggered(at_least_one=1), "format.at_least_one", "invalid_parameter"),
        (separated(separator=None), "format.separator", "invalid_parameter"),
        ({"type": "repeat", "min": 2, "max": 1, "content": ANY}, "format.max", "invalid_parameter"),
        (sequence(ANY, INTEGER), "format.elements[0]", "invalid_parameter"),
        (sequence(const("a"), tag("<", sequence(triggered(), INTEGER), ">")), "format.elements[1].content.elements[0]",
         "invalid_parameter"),
        ({"type": "json_schema", "json_schema": False}, "format.json_schema", "invalid_parameter"),
        ({"type": "grammar", "grammar": "root ::= ((("}, "format.grammar", "invalid_parameter"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_followed_is_named(given: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidParameter if code == "invalid_parameter" else Unsupported) as refused:
        structural_tag_grammar(given, "field")
    assert refused.value.param == f"field.{param}"
    assert refused.value.message.startswith(f"field.{param}: ")


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        (regex("(a"), "pattern"),
        ({"type": "grammar", "grammar": "start: missing"}, "grammar"),
    ],
)
def test_an_error_of_the_matcher_names_the_part(part: dict[str, Any], place: str) -> None:
    given = sequence(tag("<", INTEGER, ">"), tag("(", part, ")"), regex("ok"))
    with pytest.raises(InvalidParameter) as refused:
        checked("", IN_FULL, structural_tag_grammar(given, "response_format"), "response_format")
    assert (refused.value.param or "").startswith(f"response_format.format.elements[1].content.{place}")
    assert refused.value.message.startswith(f"{refused.value.param}: ")


def test_parts_and_their_depth_have_a_limit() -> None:
    deep = const("a")
    for _ in range(MAX_DEPTH):
        deep = {"type": "optional", "content": deep}
    for given in (deep, sequence(*[sequence(*[const("a")] * 8)] * (MAX_PARTS // 8))):
        with pytest.raises(InvalidParameter, match="parts"):
            structural_tag_grammar(given, "field")


def test_a_long_structural_tag_has_a_grammar_of_limited_length() -> None:
    """Parts that several ways lead to are written once."""
    choice = either(*(either(const(f"{n}"), INTEGER) for n in range(20)))
    text = structural_tag_grammar(sequence(*[choice] * 8, ANY), "field")
    assert len(text) < 60_000
