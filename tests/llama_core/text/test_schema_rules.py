"""Schemas with bounded numbers take the same texts as llguidance's own grammar of the schema, except for longer numbers."""

import json
import random
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from llama_core.errors import InvalidParameter
from llama_core.text.grammar import checked_grammar, json_object_grammar, json_schema_grammar, limits, schema_of
from llama_core.text.schema_numbers import MAX_INTEGER, bounded_schema, number_terminal
from llama_core.text.schema_rules import MAX_CHARS
from llama_core.text.tools.schema_grammar import compiled_schema
from tests.support.full_runs import examples
from tests.support.json_schemas import random_root, random_text

BYTES = LLTokenizer("byte")


def follows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


def bounded(schema: Any) -> str:
    return checked_grammar(json_schema_grammar(schema), "schema")


def of_arguments(schema: Any) -> str:
    """The grammar of a tool's arguments alone."""
    return LLMatcher.grammar_from_lark(f"start: {compiled_schema(json.dumps(schema), True)}")


def test_the_rules_take_the_texts_of_the_schema() -> None:
    num_accepted = num_compared = num_rules = 0
    num_schemas = examples(50, 150)
    for seed in range(num_schemas):
        draw = random.Random(seed)
        schema = random_root(draw)
        try:
            own = bounded(schema)
        except InvalidParameter:
            continue
        num_rules += "lark_grammar" in own
        whole = json_schema_grammar(schema)
        for _ in range(12):
            text = random_text(draw, schema, schema)
            expected = follows(whole, text)
            assert follows(own, text) == expected, (text, schema)
            num_accepted += expected
            num_compared += 1
    assert num_rules > num_schemas // 3
    assert num_accepted > 4 * num_schemas and num_compared - num_accepted > 4 * num_schemas // 3


NUMBER = {"type": "number"}
PLACES: list[tuple[Any, str]] = [
    (NUMBER, "N"),
    (True, '{"x": [N]}'),
    ({}, "[N]"),
    ({"type": "object"}, '{"x": N, "y": {"z": [N]}}'),
    ({"type": "object", "additionalProperties": NUMBER}, '{"x": N}'),
    ({"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}, '{"a": N}'),
    ({"type": "object", "properties": {"a": {"type": "string"}}}, '{"b": N}'),
    ({"type": "array"}, "[N]"),
    ({"type": "array", "items": NUMBER, "minItems": 2}, "[N, N]"),
    ({"type": "array", "prefixItems": [{"type": "null"}, NUMBER]}, "[null, N]"),
    ({"anyOf": [{"type": "boolean"}, NUMBER]}, "N"),
    ({"allOf": [NUMBER]}, "N"),
    ({"type": ["number", "null"]}, "N"),
    ({"$defs": {"n": NUMBER}, "$ref": "#/$defs/n"}, "N"),
    ({"$defs": {"n": {"type": "array", "items": {"anyOf": [NUMBER, {"$ref": "#/$defs/n"}]}}}, "$ref": "#/$defs/n"}, "[[N]]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "template"), PLACES)
def test_a_number_has_a_limited_length_wherever_it_stands(schema: Any, template: str) -> None:
    made = [bounded(schema), *([of_arguments(schema)] if isinstance(schema, dict) else [])]
    for grammar in made:
        for number in ("1" * 21, f"0.{'3' * 22}", "1e308", "-1.7976931348623157e+308", "0.0000012345678901234567"):
            assert follows(grammar, template.replace("N", number)), number
        for number in ("1" * 22, f"0.{'3' * 23}", "1e1000"):
            assert not follows(grammar, template.replace("N", number)), number


@pytest.mark.parametrize(("schema", "template"), [
    ({"type": "integer"}, "N"),
    ({"type": ["integer", "null"]}, "N"),
    ({"type": "integer", "minimum": 10}, "N"),
    ({"type": "array", "items": {"type": "integer"}}, "[N]"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": N}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"ab": N}'),
])  # fmt: skip
def test_an_integer_has_64_bits(schema: Any, template: str) -> None:
    for grammar in (bounded(schema), of_arguments(schema)):
        assert follows(grammar, template.replace("N", "1844674407370955161"))
        assert not follows(grammar, template.replace("N", "1" * 20))


def test_any_object_has_bounded_numbers() -> None:
    grammar = checked_grammar(json_object_grammar(), "response_format")
    assert follows(grammar, '{"a": 1.5e3, "b": [{}, "x", null, true]}')
    assert not follows(grammar, f'{{"a": {"7" * 22}}}')
    assert not follows(grammar, "[1]")


def test_limits_of_the_schema_and_its_constants_win() -> None:
    for schema, text in (
        ({"const": 123456789012345678901234}, None),
        ({"type": "integer", "minimum": 5, "maximum": 7}, "6"),
        ({"enum": [1e30, 2]}, None),
    ):
        grammar = bounded(schema)
        assert schema_of(grammar) == schema_of(json_schema_grammar(schema))
        assert text is None or follows(grammar, text)
    assert bounded_schema({"type": "integer", "minimum": 3}) == {
        "type": "integer",
        "minimum": 3,
        "maximum": MAX_INTEGER,
    }
    assert bounded_schema({"const": {"type": "integer"}}) == {"const": {"type": "integer"}}


def test_fractions_of_seconds_have_nine_digits() -> None:
    for name, start in (("time", ""), ("date-time", "2026-11-25T")):
        grammar = bounded({"type": "string", "format": name})
        assert follows(grammar, f'"{start}10:20:30.123456789+01:00"') and follows(grammar, f'"{start}10:20:30Z"')
        assert not follows(grammar, f'"{start}10:20:30.1234567891+01:00"')


def test_a_number_lies_between_the_limits() -> None:
    draw = random.Random(3)
    for _ in range(examples(50, 150)):
        low = Decimal(draw.choice(["-120", "-12.5", "-3.25", "-1", "0", "0.5", "7", "9.95", "10", "99.9", "100"]))
        high = low + Decimal(draw.choice(["0.05", "0.5", "1", "2.5", "20", "1000"]))
        keys = draw.choice(["minimum", "exclusiveMinimum"]), draw.choice(["maximum", "exclusiveMaximum"])
        bounds = {key: value for key, value in zip(keys, (low, high), strict=True) if draw.random() < 0.75}
        terminal = number_terminal({key: float(value) for key, value in bounds.items()})
        assert terminal is not None
        grammar = LLMatcher.grammar_from_lark(f"start: N\nN: {terminal}")
        near = [low, high, low - 1, high + 1]
        near += [limit + Decimal(draw.randrange(-300, 300)) / 100 for limit in (low, high) for _ in range(8)]
        for value in near:
            over = bounds.get("maximum", 1e9) < value or bounds.get("exclusiveMaximum", 1e9) <= value
            under = bounds.get("minimum", -1e9) > value or bounds.get("exclusiveMinimum", -1e9) >= value
            assert follows(grammar, f"{value:f}") is not (over or under), (value, bounds)


def test_a_known_key_cannot_be_written_in_another_way() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert follows(bounded(schema), '{"a": "x", "\\nb": 1}')
    for key in ("a", "\\u0061"):
        assert not follows(bounded(schema), f'{{"a": "x", "{key}": 1}}')


def test_keys_beyond_ascii_are_written_as_they_are() -> None:
    schema = {"type": "object", "properties": {"größe": NUMBER, "名前": NUMBER}, "required": ["名前"]}
    for grammar in (bounded(schema), of_arguments(schema)):
        assert follows(grammar, '{"größe": 1.5, "名前": 2, "x": 3}')
        for key in ("größe", "gr\\u00f6\\u00dfe"):
            assert not follows(grammar, f'{{"名前": 2, "{key}": 3}}')


def test_definitions_that_are_no_object_define_nothing() -> None:
    values: tuple[Any, ...] = (None, [])
    for definitions in values:
        assert follows(bounded(NUMBER | {"$defs": definitions}), "1.5")


def test_what_the_rules_cannot_say_stays_a_schema() -> None:
    impossible = {"type": "object", "properties": {"a": NUMBER, "b": {"type": "integer", "minimum": 5, "maximum": 1}}}
    assert follows(bounded(impossible), '{"a": 1.5}')
    outside = {"type": "object", "properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}}
    assert "json_schema" in json.loads(bounded(outside))["grammars"][0]
    patterns = {"type": "array", "items": {"type": "object", "patternProperties": {"^a": NUMBER}}}
    assert follows(bounded(patterns), '[{"ab": 1.5}]')


def test_many_references_make_no_large_grammar() -> None:
    definitions = {f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "abc"}}
                   for i in range(40)} | {"d40": NUMBER}  # fmt: skip
    grammar = bounded({"$defs": definitions, "$ref": "#/$defs/d0"})
    assert len(grammar) < 5 * len(json.dumps(definitions))
    kept = {f"d{i}": {"const": "x" * 1000} for i in range(60)}
    wide = {"type": "array", "prefixItems": [{"anyOf": [{"$ref": f"#/$defs/d{i}"}], "minLength": i} for i in range(60)]}
    assert len(bounded(wide | {"$defs": kept})) < MAX_CHARS


def test_the_schema_of_a_grammar_is_found() -> None:
    for schema in ({"type": "object"}, {"type": "boolean"}, {"type": "array", "items": NUMBER}):
        assert schema.items() <= schema_of(bounded(schema)).items()
    assert schema_of(LLMatcher.grammar_from_regex("a")) is None
