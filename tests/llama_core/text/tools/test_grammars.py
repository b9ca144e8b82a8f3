"""Every format's grammar, followed by llguidance over real tokenizers: valid calls pass, and nothing else does."""

import json
import random
import re
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from llama_core.errors import InvalidParameter
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.grammar import (
    checked_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    limits,
    regex_grammar,
)
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.reasoning import ReasoningMarks
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizer import Tokenizer
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.schema_grammar import compiled_schema
from llama_core.text.tools.tool import Call, Tool, ToolMode, ToolUse
from tests.conftest import GOLDEN
from tests.support import vocabularies
from tests.support.full_runs import examples
from tests.support.tool_calls import FORMATS, TOOLS, random_calls


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")


@cache
def vocabulary() -> LLTokenizer:
    return grammar_vocabulary(tokenizer(), tokenizer().stop_ids)


def follows(grammar: str, ids: list[int], vocab: LLTokenizer | None = None) -> bool:
    matcher = LLMatcher(vocab or vocabulary(), grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, bos=False, eos=False)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("reasons", [False, True])
def test_a_grammar_takes_valid_calls_only(tool_format: str, mode: ToolMode, reasons: bool) -> None:
    rng = random.Random(f"{tool_format} {mode}")
    form = find_tool_format(tool_format)
    answers = AnswerFormat(tokenizer(), form, ReasoningMarks() if reasons else None)
    before = "Hm, <tool_call> {\n</think>\n\n" if reasons else ""
    many = answers.grammar(ToolUse(TOOLS, mode), begun=reasons)
    one = answers.grammar(ToolUse(TOOLS, mode, parallel=False), begun=reasons)
    checked_grammar(many, "tools")
    for _ in range(examples(8, 30)):
        calls = random_calls(rng, 2)
        single, double = (before + form.written_calls(each) for each in (calls[:1], calls))
        assert follows(many, ids(single)), single
        assert follows(one, ids(single)), single
        assert follows(many, ids(double)), double
        assert not follows(one, ids(double)), double
    for arguments in (  # each breaks its schema
        '{"city": 3}',
        "{}",
        '{"city": "x", "days": 99}',
        '{"city": "x", "other": 1}',
        '{"city": "x", "tags": ["z"]}',
    ):
        assert not follows(many, ids(before + form.written_calls([Call("get_weather", arguments)]))), arguments
    assert follows(many, ids(before + "Hello there. [x] {1}")) is (mode == "auto")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_named_tool_is_the_only_one(tool_format: str) -> None:
    form = find_tool_format(tool_format)
    grammar = AnswerFormat(tokenizer(), form, None).grammar(ToolUse(TOOLS[1:2], "required"), begun=False)
    assert follows(grammar, ids(form.written_calls([Call("get-time", "{}")])))
    assert not follows(grammar, ids(form.written_calls([Call("get_weather", '{"city": "x"}')])))


@pytest.mark.parametrize(("tool_format", "marks"), [
    ("hermes", ("<tool_call>", "</tool_call>")), ("llama3_json", ("<|python_tag|>",)), ("mistral", ("[TOOL_CALLS]",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
])  # fmt: skip
def test_marks_that_are_control_tokens_begin_calls(
    tool_format: str, marks: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made, config = vocabularies.llama3()
    made.add_special_tokens(vocabularies.special(*marks))
    folder = tmp_path_factory.mktemp(tool_format)
    vocabularies.write_folder(folder, made, config)
    own = load_tokenizer(folder / "tokenizer.json")
    form = find_tool_format(tool_format)
    answers = AnswerFormat(own, form, None)
    vocab = grammar_vocabulary(own, own.stop_ids)
    assert answers.shown_tokens(ToolUse(TOOLS)) >= {own.control_texts[marks[0]]}
    written = form.written_calls([Call("get_weather", '{"city": "Rome"}')])
    written = marks[0] + written if tool_format == "llama3_json" else written
    for mode, text in (("auto", written), ("required", form.written_calls([Call("get_weather", '{"city": "Rome"}')]))):
        use = ToolUse(TOOLS, "auto" if mode == "auto" else "required")
        assert follows(answers.grammar(use, begun=False), own.encode_special(text), vocab)
    bad = own.encode_special(written.replace('"Rome"', "3"))
    assert not follows(answers.grammar(ToolUse(TOOLS), begun=False), bad, vocab)


def test_a_keyword_that_is_not_supported_is_refused_where_strict_and_left_out_elsewhere() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(InvalidParameter, match="the keyword uniqueItems is not supported in a strict schema") as caught:
        compiled_schema(schema, True)
    assert caught.value.param == ".properties[0].uniqueItems"
    assert '"lenient":true' in compiled_schema(schema, False)
    answers = AnswerFormat(tokenizer(), find_tool_format("hermes"), None)
    with pytest.raises(InvalidParameter) as caught:
        answers.grammar(ToolUse((TOOLS[0], Tool("b", None, schema, strict=True))), begun=False)
    assert caught.value.param == "tools[1].function.parameters.properties[0].uniqueItems"


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_follow_keywords_for_which_an_equal_schema_exists(tool_format: str) -> None:
    colors = {"type": "array", "items": {"enum": ["red", "blue"]}, "uniqueItems": True}
    counts = {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}}
    schema = {"type": "object", "properties": {"colors": colors, "counts": counts}, "additionalProperties": False}
    form = find_tool_format(tool_format)
    use = ToolUse((Tool("f", None, json.dumps(schema)),), "required")
    grammar = AnswerFormat(tokenizer(), form, None).grammar(use, begun=False)

    def takes(arguments: str) -> bool:
        return follows(grammar, ids(form.written_calls([Call("f", arguments)])))

    assert takes('{"colors": ["red", "blue"], "counts": {"y": 1}}')
    assert not takes('{"colors": ["red", "red"]}') and not takes('{"counts": {"z": 1}}')


@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_format_names_the_place_in_the_schema_that_is_refused(tool_format: str) -> None:
    answers = AnswerFormat(tokenizer(), find_tool_format(tool_format), None)
    schema = {"type": "object", "properties": {"x": {}, "secret": {"type": "array", "items": {"type": "secret"}}}}
    for place in ("", "functions[7].parameters"):
        tools = (TOOLS[0], Tool("b", None, json.dumps(schema), place=place))
        with pytest.raises(InvalidParameter) as caught:
            answers.grammar(ToolUse(tools), begun=False)
        expected = (place or "tools[1].function.parameters") + ".properties[1].items.type"
        assert caught.value.param == expected and caught.value.message.startswith(f"{expected}: must be one of")


def test_a_strict_schema_may_be_mended_or_made_not_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "x"}}}
    with pytest.raises(InvalidParameter, match=r"the keyword uniqueItems is not supported.* set strict to false"):
        compiled_schema(json.dumps(schema), True)
    with pytest.raises(InvalidParameter, match=r"must be one of [a-z, ]+$"):
        compiled_schema(json.dumps(schema), False)


def test_numbers_of_arguments_have_a_limited_length_unless_the_grammar_grows_too_long() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "number"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for tool_format in FORMATS:
        form = find_tool_format(tool_format)
        tools = (Tool("f", None, json.dumps(schema)), *(Tool(f"g{i}", None, "{}") for i in range(3)))
        grammar = AnswerFormat(tokenizer(), form, None).grammar(ToolUse(tools, "required"), begun=False)
        for digits, is_right in ((21, True), (22, False)):
            call = form.written_calls([Call("f", json.dumps({"a": int("7" * digits)}))])
            assert follows(grammar, ids(call)) is is_right, call
    wide = {f"p{i}": {"type": "number", "minimum": i + 0.5, "maximum": 99.5} for i in range(150)}
    many = tuple(Tool(f"f{i}", None, json.dumps({"type": "object", "properties": wide})) for i in range(11))
    form = find_tool_format("hermes")
    grammar = AnswerFormat(tokenizer(), form, None).grammar(ToolUse(many, "required"), begun=False)
    assert follows(grammar, ids(form.written_calls([Call("f7", json.dumps({"p0": 7.25}))])))


def test_an_error_of_a_schema_repeats_nothing_of_it() -> None:
    for schema in ({"type": "secret"}, {"type": "object", "properties": {"secret": {"$ref": "#/secret"}}},
                   {"type": "object", "properties": {"a": {"pattern": "(?=secret)"}}}):  # fmt: skip
        with pytest.raises(InvalidParameter) as caught:
            compiled_schema(json.dumps(schema), False)
        assert "secret" not in caught.value.message


def test_a_grammar_for_the_answer_begins_behind_the_reasoning() -> None:
    answers = AnswerFormat(tokenizer(), find_tool_format("hermes"), ReasoningMarks())
    yes = lark_grammar('start: "yes"')
    for begun, before in ((True, "so\n"), (False, "<think>so")):
        grammar = answers.after_reasoning(yes, begun=begun)
        checked_grammar(grammar, "response_format")
        assert follows(grammar, ids(before + "</think>\n\nyes"))
        assert not follows(grammar, ids(before + "</think>\n\nno"))


ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "number"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_an_answer_beside_tools_is_a_call_or_follows_its_schema(tool_format: str, reasons: bool) -> None:
    rng = random.Random(tool_format)
    form = find_tool_format(tool_format)
    answers = AnswerFormat(tokenizer(), form, ReasoningMarks() if reasons else None)
    before = "Hm, {\n</think>\n\n" if reasons else ""
    proper = checked_grammar(json_schema_grammar(ANSWER), "response_format")
    assert "lark_grammar" in json.loads(proper)["grammars"][0]
    either = answers.grammar_or(ToolUse(TOOLS), proper, "response_format", begun=reasons)
    checked_grammar(either, "response_format")
    for num_calls in (1, 2) * examples(3, 10):
        calls = form.written_calls(random_calls(rng, num_calls))
        assert follows(either, ids(before + calls)), calls
    for name in ("Ann", "get_weather", "get-time"):
        for indent in (None, 2):
            written = json.dumps({"name": name, "age": 31}, indent=indent)
            assert follows(either, ids(before + written)), written
    bad_call = form.written_calls([Call("get_weather", '{"city": 3}')])
    for text in (bad_call, "Hello", '{"name": "Ann"}', '{"name": "Ann", "age": "x"}', ""):
        assert not follows(either, ids(before + text)), text


@pytest.mark.parametrize("tool_format", FORMATS)
def test_an_answer_that_cannot_be_told_from_a_call_is_refused(tool_format: str) -> None:
    answers = AnswerFormat(tokenizer(), find_tool_format(tool_format), None)
    use = ToolUse(TOOLS)
    opening = find_tool_format(tool_format).written_calls([Call("f", "{}")])[0]
    for before in ("", " ", "( |\n)?", "\n {9}", "(\t\n )*"):
        with pytest.raises(InvalidParameter, match=f"allow no answer that begins with '{re.escape(opening)}'"):
            answers.grammar_or(use, regex_grammar(f"{before}{re.escape(opening)}a+"), "response_format", begun=False)
    either = answers.grammar_or(use, regex_grammar("a+"), "response_format", begun=False)
    assert follows(either, ids("aaa")) and not follows(either, ids("aab"))
    if tool_format == "llama3_json":
        names = {"name": {"type": "string"}, "parameters": {"type": "object"}}
        for schema in ({"type": "object"}, {"type": "object", "properties": names, "additionalProperties": False}):
            with pytest.raises(InvalidParameter, match="additionalProperties false"):
                answers.grammar_or(use, json_schema_grammar(schema), "response_format", begun=False)
    else:
        either = answers.grammar_or(use, json_object_grammar(), "response_format", begun=False)
        assert follows(either, ids('{"any": ["thing"]}')) and not follows(either, ids("thing"))
