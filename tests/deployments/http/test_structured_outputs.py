"""The fields that ask for structured output become a grammar; what cannot be followed is a 400 that names the field."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.http.limits import HttpLimits
from deployments.http.plan import AnswerParsing, chat_grammar, plan_chat, plan_completion
from deployments.http.prompt_encoder import PromptEncoder
from deployments.http.schemas import ChatBody, CompletionBody
from deployments.http.structured_outputs import grammar_of
from llama_core.errors import InvalidParameter, InvalidRequest
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.grammar import json_schema_grammar, unique_lists_of
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.reasoning import ReasoningMarks
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import Tool, ToolUse
from tests.support.scripted_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMA_PLACE = "response_format.json_schema.schema"
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"items": DEEP}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": '<f="%json {', "schema": {"description": '"\n"'}, "end": "\n"},
        {"begin": "<f", "schema": {"properties": {"a": {"type": "x"}}}, "end": ">"},
    ],
    "triggers": ["<f"],
}
OPTIONS = {
    "backend": "xgrammar", "disable_fallback": True, "disable_any_whitespace": False, "disable_additional_properties": False,
    "whitespace_pattern": None,
}  # fmt: skip
TOKENIZER = FakeEngine().tokenizer
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)


async def planned(**fields: Any) -> str:
    engine = FakeEngine()
    encoder = PromptEncoder(engine, HttpLimits().text)
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9} | fields)
    completion = CompletionBody.model_validate({"prompt": "x", "max_tokens": 9} | fields)
    grammar = (await plan_chat(chat, engine, encoder)).params[0].grammar
    assert (await plan_completion(completion, engine, encoder)).params[0].grammar == grammar
    return grammar


def follows(text: str, grammar: str) -> bool:
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    ids = TOKENIZER.encode(text, bos=False, eos=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1, null]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '{"a": 5}', '{"b": 5}'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 5}', '{"b": 5}'),
        ({"response_format": {"type": "json_object", "schema": None}}, '{"b": 5}', "5"),
        ({"response_format": {"type": "json_object", "schema": {}}}, '{"b": 5}', "5"),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, '{"a": 5}', '{"b": 5}'),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '{"a": 5}', '{"b": 5}'),
        ({"response_format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}}, '{"a": 5}', "{}"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, '{"a": 5}', '{"b": 5}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "[5]", "x"),
        ({"structured_outputs": {"json": SCHEMA}}, '{\n  "a": 5\n}', '{"a": "5"}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "3"),
        ({"structured_outputs": {"json": SCHEMA} | OPTIONS}, '{"a": 5}', '{"b": 5}'),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "abc", "abd"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "yesno"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x1", "x"),
        ({"guided_json": '{"type": "integer"}'}, "-12", "1.5"),
        ({"guided_regex": "a?b"}, "ab", "aab"),
        ({"guided_choice": ["a b"]}, "a b", "a"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "y", "xy"),
        ({"grammar": 'root ::= "x"+'}, "xx", "xy"),
        ({"json_schema": {"const": 3}}, "3", "4"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<f=", "schema": SCHEMA, "end": ">"}],
                    "triggers": ["<f"],
                }
            },
            'so <f={"a": 1}> it is',
            "so <f=1> it is",
        ),
    ],
)  # fmt: skip
async def test_a_field_becomes_a_grammar(fields: dict[str, Any], right: str, wrong: str) -> None:
    grammar = await planned(**fields)
    assert follows(right, grammar) and not follows(wrong, grammar)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"guided_grammar": 'root ::= "x"'}, {"structured_outputs": {"grammar": 'root ::= "x"'}}),
        ({"guided_regex": "a+", "regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_json": SCHEMA}, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ],
)
async def test_an_older_name_may_have_its_successor_beside_it_with_an_equal_value(
    older: dict[str, Any], newer: dict[str, Any]
) -> None:
    """As guidance sends them to vLLM."""
    assert await planned(**older, **newer) == await planned(**newer) == await planned(**older) != ""


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}},
                                    {"structured_outputs": {"json": None, "json_object": False}}])  # fmt: skip
async def test_plain_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert await planned(**fields) == ""


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "type must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"items": [{}, {"type": "array", "uniqueItems": True}]}},
                }
            },
            "response_format.json_schema.schema.items[1].uniqueItems",
            "uniqueItems is not supported",
        ),
        ({"guided_json": {"properties": {"a": {"type": "x"}}}}, "guided_json.properties[0].type", "must be one of"),
        ({"guided_json": '{"items": {"minimum": 1e999}}'}, "guided_json.items.minimum", "finite"),
        ({"guided_json": "[" * 10**5}, "guided_json", "not JSON"),
        ({"guided_json": False}, "guided_json", "no value satisfies false"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "no value satisfies false"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar", "no text follows it"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json", "no value satisfies it"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
            SCHEMA_PLACE,
            "no value satisfies it",
        ),
        ({"structured_outputs": {"regex": False}}, "structured_outputs.regex", "must be a regular expression"),
        ({"json_schema": {"$ref": "#/a"}}, "json_schema.$ref", "names no part"),
        ({"structured_outputs": {"json": {"pattern": "[0-9]("}}}, "structured_outputs.json.pattern", "at character 6"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
            "response_format.json_schema.schema",
            "124 levels",
        ),
        (
            {
                "response_format": TAGS
                | {"structures": [{"begin": "<", "schema": {"multipleOf": -7}, "end": ">"}], "triggers": ["<"]}
            },
            "response_format.structures[0].schema.multipleOf",
            "greater than 0",
        ),
        ({"response_format": TAGS}, "response_format.structures[1].schema.properties[0].type", "must be one of"),
        (
            {"structured_outputs": {"structural_tag": TAGS}},
            "structured_outputs.structural_tag.structures[1].schema.properties[0].type",
            "must be one of",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, SCHEMA_PLACE, "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, SCHEMA_PLACE, "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, SCHEMA_PLACE, "JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "type": "object"}}},
            SCHEMA_PLACE,
            "required",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": True}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "json_schema", "schema": 5}}, "response_format.schema", "JSON schema"),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}},
            "response_format.schema",
            "exclude",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "type",
        ),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "type"),
        (
            {"response_format": {"type": "json_object", "schema": {"properties": {"a": {"type": "x"}}}}},
            "response_format.schema.properties[0].type",
            "must be one of",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "array", "items": {"pattern": "("}}}},
            "response_format.json_schema.items.pattern",
            "at character 1",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "at character 1: unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"guided_choice": ["a", "é", "\ud800"]}, "guided_choice[2]", "surrogates"),
        ({"guided_regex": "\ud800"}, "guided_regex", "surrogates"),
        ({"guided_grammar": "\ud800"}, "guided_grammar", "surrogates"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "one of json, "),
        ({"structured_outputs": {"json": SCHEMA, "xml": 1}}, "structured_outputs", "backend"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            "structured_outputs.whitespace_pattern",
            "at most one space",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "at most one space",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "additionalProperties",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "exclude"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "line 1, column 8: "),
        ({"guided_grammar": "root ::= ((("}, "guided_grammar", "GBNF: line 1, column 13: "),
        ({"guided_choice": ["x"], "guided_regex": "y"}, "guided_choice", "exclude"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "196608 bytes"),
        ({"json_schema": "[" * 200_000}, "json_schema", "196608 bytes"),
        (
            {"json_schema": {"enum": [f"value {i}" for i in range(9000)]}},
            "json_schema",
            "a grammar of more than 196608",
        ),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "too large or too complex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
        (
            {"structured_outputs": {"structural_tag": {"structures": [{"begin": "x", "end": ""}], "triggers": ["y"]}}},
            "structured_outputs.structural_tag",
            "triggers",
        ),
        *(
            ({"response_format": {"type": "structural_tag"} | tags}, "response_format", "triggers, a list of strings")
            for tags in (
                {"structures": [], "triggers": ["<"]},
                {"structures": [{"begin": "<f", "end": ">"}], "triggers": "<"},
                {"structures": [{"begin": "<f", "end": ">"}], "triggers": ["", "<"]},
                {"structures": [{"begin": "<f", "end": ">"}], "triggers": ["<", 5]},
            )
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await planned(**fields)
    assert refused.value.param == param
    assert words in refused.value.message and refused.value.message.startswith(param)


async def test_gbnf_is_converted_where_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await planned(guided_grammar='root ::= "once" [a-z]')
    monkeypatch.delattr("llama_core.text.gbnf.gbnf_to_lark")
    body = CompletionBody.model_validate({"prompt": "x", "guided_grammar": 'root ::= "more" [a-z]'})
    assert grammar_of(body)[1] == "guided_grammar"  # on the event loop
    assert await planned(guided_grammar='root ::= "once" [a-z]') == expected  # kept
    with pytest.raises(InvalidParameter, match="196608 bytes"):
        await planned(guided_grammar='root ::= "' + "a" * 200_000 + '"')


async def test_structures_are_refused_without_a_place_in_the_grammar_that_is_made_of_them() -> None:
    structures = [{"begin": "<f\ud800", "schema": {}, "end": ">"}]
    with pytest.raises(InvalidParameter) as refused:
        await planned(structured_outputs={"structural_tag": TAGS | {"structures": structures}})
    assert refused.value.message == "structured_outputs.structural_tag: the text in quotes is not valid"


SET = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}


async def test_sets_of_strings_are_followed_where_the_json_is_the_whole_answer() -> None:
    encoder = PromptEncoder(FakeEngine(), HttpLimits().text)
    grammar = await planned(response_format={"type": "json_schema", "json_schema": {"schema": SET}})
    assert unique_lists_of(grammar) == {"root": [0], "states": [{"names": {"a": [1]}}, {"is_unique": True}]}
    hermes, marks = find_tool_format("hermes"), ReasoningMarks("<think>", "</think>")
    calls = ToolUse((Tool("f", None, "{}"),), "auto")
    for use, reasoning in ((calls, None), (None, marks)):
        parsing = AnswerParsing(AnswerFormat(TOKENIZER, hermes, reasoning), use, begun=False)
        with pytest.raises(InvalidParameter) as refused:
            await chat_grammar(json_schema_grammar(SET), "guided_json", encoder, parsing)
        assert refused.value.param == "guided_json.properties[0].uniqueItems"
