"""Every format's grammar, followed by llguidance over real tokenizers: valid calls pass, and nothing else does."""

import json
import random
import re
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from llama_core.errors import InvalidParameter
from llama_core.grammar.answers import answer_grammar
from llama_core.grammar.build import json_object_grammar, json_schema_grammar, lark_grammar, regex_grammar
from llama_core.grammar.check import limits
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.reasoning import KINDS, Marks
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer
from llama_core.text.tools.tool import Call, Tool, ToolMode, ToolUse
from llama_core.text.tools.tool_format import find_tool_format
from tests.conftest import GOLDEN
from tests.support import vocabularies
from tests.support.chat_templates import make_chat_model
from tests.support.full_runs import examples
from tests.support.tool_calls import FORMATS, TOOLS, random_calls

THINK, _, HARMONY = KINDS


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


def form_of(tool_format: str, *, marks: Marks | None = None) -> AnswerFormat:
    return AnswerFormat(tokenizer(), find_tool_format(tool_format), marks)


def calls(tool_format: str, use: ToolUse, wanted: str = "", *, begun: bool | None = None) -> str:
    return answer_grammar(
        form_of(tool_format, marks=None if begun is None else THINK), wanted, "field", use, begun=begun
    )


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, bos=False, eos=False)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("reasons", [False, True])
def test_a_grammar_takes_valid_calls_only(tool_format: str, mode: ToolMode, reasons: bool) -> None:
    rng = random.Random(f"{tool_format} {mode}")
    form = find_tool_format(tool_format)
    before = "Hm, <tool_call> {\n</think>\n\n" if reasons else ""
    many = calls(tool_format, ToolUse(TOOLS, mode), begun=True if reasons else None)
    one = calls(tool_format, ToolUse(TOOLS, mode, parallel=False), begun=True if reasons else None)
    for _ in range(examples(8, 30)):
        made = random_calls(rng, 2)
        single, double = (before + form.written_calls(each) for each in (made[:1], made))
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


@pytest.mark.parametrize(("tool_format", "marks"), [
    ("hermes", ("<tool_call>", "</tool_call>")), ("llama3_json", ("<|python_tag|>",)), ("mistral", ("[TOOL_CALLS]",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")), ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("harmony", ("<|channel|>", "<|start|>", "<|constrain|>", "<|message|>", "<|call|>")),
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
    answers = AnswerFormat(own, form, marks=None)
    vocab = grammar_vocabulary(own, own.stop_ids)
    assert answers.shown_tokens(ToolUse(TOOLS)) >= {own.control_texts[marks[0]]}
    written = form.written_calls([Call("get_weather", '{"city": "Rome"}')])
    written = marks[0] + written if tool_format == "llama3_json" else written
    for mode, text in (("auto", written), ("required", form.written_calls([Call("get_weather", '{"city": "Rome"}')]))):
        use = ToolUse(TOOLS, "auto" if mode == "auto" else "required")
        assert follows(answer_grammar(answers, "", "", use), own.encode_special(text), vocab)
    bad = own.encode_special(written.replace('"Rome"', "3"))
    assert not follows(answer_grammar(answers, "", "", ToolUse(TOOLS)), bad, vocab)


@pytest.mark.parametrize(("tool_format", "opening"), [("granite", "<tool_call>["), ("phi4_mini_json", "functools[")])
def test_a_call_after_another_opening_follows_its_schema(tool_format: str, opening: str) -> None:
    grammar = calls(tool_format, ToolUse(TOOLS))
    for arguments, is_allowed in (('{"city": "Rome"}', True), ('{"city": 3}', False)):
        text = f'Hm. {opening}{{"name": "get_weather", "arguments": {arguments}}}]'
        assert follows(grammar, ids(text)) is is_allowed
    assert follows(grammar, ids(f"Write import {opening[:-1]} and go on."))


def test_an_unknown_keyword_is_refused_where_strict_and_left_out_elsewhere() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    for place, named in (("", "tools[1].function.parameters"), ("functions[7].parameters", "functions[7].parameters")):
        with pytest.raises(InvalidParameter, match=r"uniqueItems.*set strict to false") as caught:
            calls("hermes", ToolUse((TOOLS[0], Tool("b", None, schema, strict=True, place=place))))
        assert caught.value.param == named and caught.value.message.startswith(f"{named}: Unimplemented keys")
    grammar = calls("hermes", ToolUse((Tool("f", None, schema),), "required"))
    assert follows(grammar, ids(find_tool_format("hermes").written_calls([Call("f", '{"a": [1, 1]}')])))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_have_no_arguments_beside_those_that_the_schema_names(tool_format: str, strict: bool) -> None:
    pet = {"type": "object", "properties": {"name": {"type": "string"}}}
    schema = {
        "$defs": {"Pet": pet},
        "type": "object",
        "properties": {"pet": {"$ref": "#/$defs/Pet"}, "n": {"type": "integer"}},
    }
    grammar = calls(tool_format, ToolUse((Tool("f", None, json.dumps(schema), strict),), "required"))
    form = find_tool_format(tool_format)
    for arguments, is_allowed in (
        ('{"pet": {"name": "x"}, "n": 1}', True),
        ('{"pet": {"name": "x"}, "other": 1}', False),
        ('{"pet": {"other": "x"}}', False),
    ):
        assert follows(grammar, ids(form.written_calls([Call("f", arguments)]))) is is_allowed, arguments


def test_tools_that_are_too_large_together_are_refused_together() -> None:
    wide = json.dumps({"type": "object", "properties": {f"property_{i}": {"enum": ["x" * 40]} for i in range(200)}})
    with pytest.raises(InvalidParameter) as caught:
        calls("hermes", ToolUse(tuple(Tool(f"f{i}", None, wide) for i in range(20))))
    assert caught.value.param == "tools"


def test_a_grammar_for_the_answer_begins_after_the_reasoning() -> None:
    yes = lark_grammar('start: "yes"')
    for begun, before in ((True, "so\n"), (False, "<think>so")):
        grammar = answer_grammar(form_of("hermes", marks=THINK), yes, "field", begun=begun)
        assert follows(grammar, ids(before + "</think>\n\nyes"))
        assert not follows(grammar, ids(before + "</think>\n\nno"))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = make_chat_model("harmony", tmp_path_factory.mktemp("harmony"))
    return load_tokenizer(folder / "tokenizer.json")


THOUGHT = "<|channel|>analysis<|message|>Hm, {.<|end|><|start|>assistant"
ASIDE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALLS = tuple(
    f"{head}<|message|>"
    for head in (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weather json",
        " to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json",
    )
)


def follows_harmony(own: Tokenizer, wanted: str, use: ToolUse | None, text: str) -> bool:
    form = AnswerFormat(own, find_tool_format("harmony"), HARMONY)
    grammar = answer_grammar(form, wanted, "field", use, begun=False)
    return follows(grammar, own.encode_special(text), grammar_vocabulary(own, own.stop_ids))


@pytest.mark.parametrize("before", ["", THOUGHT, THOUGHT + THOUGHT])
def test_a_grammar_constrains_the_final_channel_alone(before: str, harmony: Tokenizer) -> None:
    wanted = json_schema_grammar(ANSWER)
    good, bad = '{"name": "Ann", "age": 31}', '{"name": "Ann"}'
    for use in (None, ToolUse(TOOLS)):
        assert follows_harmony(harmony, wanted, use, before + FINAL + good)
        for text in (FINAL + bad, "<|channel|>analysis<|message|>" + good, good, ASIDE + FINAL + good, ""):
            assert not follows_harmony(harmony, wanted, use, before + text), text
        assert follows_harmony(harmony, wanted, use, before + CALLS[0] + '{"city": "Rome"}') is (use is not None)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("before", ["", THOUGHT, THOUGHT + THOUGHT])
def test_calls_in_messages_follow_their_schemas(mode: ToolMode, before: str, harmony: Tokenizer) -> None:
    use = ToolUse(TOOLS, mode)
    for head in CALLS:
        assert follows_harmony(harmony, "", use, before + head + '{"city": "Rome"}'), head
        assert not follows_harmony(harmony, "", use, before + head + '{"city": 3}'), head
        assert not follows_harmony(harmony, "", use, before + head.replace("get_weather", "other") + "{}"), head
    assert follows_harmony(harmony, "", use, before + FINAL + "Hello. {") is (mode == "auto")
    for text in (ASIDE + FINAL + "So.", ASIDE + THOUGHT + CALLS[0] + '{"city": "Rome"}'):
        assert follows_harmony(harmony, "", use, before + text) is (mode == "auto")
    assert not follows_harmony(harmony, "", use, before + ASIDE + CALLS[0] + '{"city": 3}')


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
    before = "Hm, {\n</think>\n\n" if reasons else ""
    either = calls(tool_format, ToolUse(TOOLS), json_schema_grammar(ANSWER), begun=True if reasons else None)
    for num_calls in (1, 2) * examples(3, 10):
        written = form.written_calls(random_calls(rng, num_calls))
        assert follows(either, ids(before + written)), written
    for name in ("Ann", "get_weather", "get-time"):
        for indent in (None, 2):
            written = json.dumps({"name": name, "age": 31}, indent=indent)
            assert follows(either, ids(before + written)), written
    bad_call = form.written_calls([Call("get_weather", '{"city": 3}')])
    for text in (bad_call, "Hello", '{"name": "Ann"}', '{"name": "Ann", "age": "x"}', ""):
        assert not follows(either, ids(before + text)), text


@pytest.mark.parametrize("tool_format", FORMATS)
def test_an_answer_that_cannot_be_told_from_a_call_is_refused(tool_format: str) -> None:
    use = ToolUse(TOOLS)
    opening = find_tool_format(tool_format).written_calls([Call("f", "{}")])[0]
    for before in ("", " ", "( |\n)?", "\n {9}", "(\t\n )*"):
        with pytest.raises(
            InvalidParameter, match=f"allow no answer that begins as calls do, with .*'{re.escape(opening)}'"
        ):
            calls(tool_format, use, regex_grammar(f"{before}{re.escape(opening)}a+"))
    either = calls(tool_format, use, regex_grammar("a+"))
    assert follows(either, ids("aaa")) and not follows(either, ids("aab"))
    if tool_format == "llama3_json":
        names = {"name": {"type": "string"}, "parameters": {"type": "object"}}
        for schema in ({"type": "object"}, {"type": "object", "properties": names, "additionalProperties": False}):
            with pytest.raises(InvalidParameter, match="additionalProperties false"):
                calls(tool_format, use, json_schema_grammar(schema))
    else:
        either = calls(tool_format, use, json_object_grammar())
        assert follows(either, ids('{"any": ["thing"]}')) and not follows(either, ids("thing"))
