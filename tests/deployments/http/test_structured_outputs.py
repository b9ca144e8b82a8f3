"""The fields that ask for structured output become a grammar; what cannot be followed is a 400 that names the field."""

from typing import Any
from unittest.mock import patch

import pytest
from llguidance import LLMatcher

from deployments.http.limits import HttpLimits
from deployments.openai.plan import plan_chat, plan_completion
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody, CompletionBody
from llama_core.errors import InvalidRequest
from llama_core.grammar import check
from llama_core.grammar.build import regex_grammar
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.text.tools.tool import Tool, ToolUse
from tests.support.scripted_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"items": DEEP}
TAGS: dict[str, Any] = {"structures": [{"begin": "<f=", "schema": SCHEMA, "end": ">"}], "triggers": ["<f"]}
OPTIONS = {
    "backend": "xgrammar", "disable_fallback": True, "disable_any_whitespace": False, "disable_additional_properties": True,
    "whitespace_pattern": None,
}  # fmt: skip
TOKENIZER = FakeEngine().tokenizer
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)


async def planned(**fields: Any) -> str:
    engine = FakeEngine()
    encoder = PromptEncoder(HttpLimits().text).of("", engine)
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9} | fields)
    completion = CompletionBody.model_validate({"prompt": "x", "max_tokens": 9} | fields)
    grammar = (await plan_chat(chat, engine, encoder)).request.params[0].grammar
    assert (await plan_completion(completion, engine, encoder)).request.params[0].grammar == grammar
    return grammar


def follows(text: str, grammar: str) -> bool:
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    ids = TOKENIZER.encode(text, bos=False, eos=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def wrapped(schema: Any, **others: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}, **others}}


def tagged(**changes: Any) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", **TAGS, **changes}}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1, null]}', "[1]"),
        (wrapped(SCHEMA), '{"a": 5}', '{"b": 5}'),
        (wrapped(SCHEMA, strict=True), '{\n  "a": 5\n}', '{    "a": 5}'),
        (wrapped(True), "[5]", "x"),
        (wrapped({"properties": SCHEMA["properties"]}), '{"a": 5}', '{"a": 5, "b": 5}'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 5}', '{"b": 5}'),
        ({"structured_outputs": {"json": SCHEMA}}, '{\n  "a": 5\n}', '{"a": "5"}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "3"),
        ({"structured_outputs": {"json": SCHEMA} | OPTIONS}, '{"a": 5}', '{"b": 5}'),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "abc", "abd"),
        ({"structured_outputs": {"choice": ["yes", "no & ~"]}}, "no & ~", "yesno"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x1", "x"),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "-12", "1.5"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, "y", "xy"),
        ({"structured_outputs": {"json": {"const": 3}}}, "3", "4"),
        (tagged(structures=[{"begin": "<f=", "schema": {"properties": {"a": {}}}, "end": ">"}]),
         'so <f={"a": 1}> it is', 'so <f={"b": 1}> it is'),
        (tagged(), 'so <f={"a": 1}> it is', "so <f=1> it is"),
        ({"structured_outputs": {"structural_tag": TAGS}}, 'so <f={"a": 1}> it', 'so <f={   "a": 1}> it'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-guidance": {"lenient": True}}}}}, "3", "x"),
    ],
)  # fmt: skip
async def test_a_field_becomes_a_grammar(fields: dict[str, Any], right: str, wrong: str) -> None:
    grammar = await planned(**fields)
    assert follows(right, grammar) and not follows(wrong, grammar)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}},
                                    {"structured_outputs": {"json": None, "json_object": False}}])  # fmt: skip
async def test_plain_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert await planned(**fields) == ""


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "type must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is required"),
        (wrapped("{}"), "response_format.json_schema.schema", "must be a JSON schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "json_schema.schema"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format.json_schema", "json_schema.schema"),
        (wrapped({"items": [{}, {"type": "array", "uniqueItems": True}]}), "response_format", "uniqueItems"),
        (wrapped({"$ref": "#"}), "response_format", "no text follows it"),
        (wrapped(DEEP), "response_format", "recursion limit"),
        ({"structured_outputs": {"json": {"properties": {"a": {"type": "x"}}}}}, "structured_outputs.json", "Invalid type"),
        ({"structured_outputs": {"json": '{"items": {"minimum": 1e999}}'}}, "structured_outputs.json", "expected value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar", "no text follows it"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar", "line 1, column 8: "),
        ({"structured_outputs": {"grammar": "root ::= ((("}}, "structured_outputs.grammar", "is not valid GBNF"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex", "too many expressions"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"structured_outputs": {"json": {"enum": ["value"] * 30000}}}, "structured_outputs.json", "196608 bytes"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "one of json, "),
        ({"structured_outputs": {"whitespace_pattern": " ?"}}, "structured_outputs.whitespace_pattern", "at most one space"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "exclude"),
        (tagged(format={"type": "any_text"}), "response_format", "the form with format is not supported"),
        (tagged(structures=[]), "response_format", "triggers, a list of strings"),
        (tagged(triggers=["y"]), "response_format", "one of the triggers"),
        (tagged(structures=[{"begin": "<f", "end": "", "schema": [1]}]), "response_format", "begin, schema and end"),
        (tagged(structures=[{"begin": "<f", "end": "", "schema": {"not": {}}}]), "response_format", "Unimplemented keys"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await planned(**fields)
    assert refused.value.param == param
    assert words in refused.value.message and refused.value.message.startswith(param)


async def test_an_owner_finds_out_nothing_by_what_was_checked_for_another() -> None:
    engine, encoder, use = FakeEngine(), PromptEncoder(HttpLimits().text), ToolUse((Tool("scoped"),))
    with patch.object(check, "_fault", side_effect=check._fault) as compiled:

        async def compiles(owner: str) -> int:
            before = compiled.call_count
            await encoder.of(owner, engine).grammar(regex_grammar("scoped"), "structured_outputs.regex")
            await encoder.of(owner, engine).grammar("", "", use)
            return compiled.call_count - before

        first = await compiles("key a")
        assert first == 3 and await compiles("key a") == 0  # the expression, the tool alone and all tools
        assert await compiles("key b") == first, "the time of an answer would tell what key a has sent"
