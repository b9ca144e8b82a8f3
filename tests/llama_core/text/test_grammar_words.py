"""Errors of regular expressions, of Lark and of GBNF name the place, in words that repeat nothing of the source."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from llama_core.errors import InvalidParameter
from llama_core.text.gbnf import is_gbnf, rule_lines
from llama_core.text.grammar import (
    BRIEFLY,
    IN_FULL,
    Checks,
    checked_grammar,
    choice_grammar,
    json_schema_grammar,
    kept,
    lark_grammar,
    limits,
    regex_grammar,
)
from llama_core.text.grammar_words import is_beyond_limits, lark_words

MARK = "Zq7Marker"


def reason(grammar: str) -> str:
    with pytest.raises(InvalidParameter) as refused:
        checked_grammar(grammar, "field")
    assert refused.value.param == "field"
    return refused.value.message.removeprefix("field: ")


@pytest.mark.parametrize(
    ("regex", "character", "words"),
    [
        ("(a", 1, "unclosed group"),
        (f"é{MARK}(?=x)", 11, "look-around, including look-ahead and look-behind, is not supported"),
        ("a\\1", 2, "backreferences are not supported"),
        ("ab[z-a]", 4, "invalid character class range, the start must be <= the end"),
        ("a/b\n\tc(d", 7, "unclosed group"),  # llguidance compiles \/ for / and \n for a line break
        ("a\\/b\\/(d", 7, "unclosed group"),
        ("/\\p{" + MARK + "}", 2, "Unicode property not found"),
        (f"x\nerror: {MARK}\n)", 20, "unopened group"),
        ("a{3,2}", 2, "invalid repetition count range, the start must be <= the end"),
        ("*", 1, "repetition operator missing expression"),
    ],
)
def test_an_error_of_a_regular_expression_names_the_character(regex: str, character: int, words: str) -> None:
    expected = f"is not a regular expression that can be followed at character {character}: {words}"
    assert reason(regex_grammar(regex)) == expected


def test_a_word_boundary_is_named_without_its_place() -> None:
    assert reason(regex_grammar(f"{MARK}\\b")) == (
        "is not a regular expression that can be followed: a word boundary is not supported"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"start: {MARK.lower()}", "line 1, column 8: a rule or a terminal has no definition"),
        (f'start: "é" {MARK.upper()}\n', "line 1, column 8: a rule or a terminal has no definition"),
        (f'start: "a"\n\nb: "é" ${MARK}', "line 3, column 8: the syntax is not valid here"),
        (f'start: a\na: "é" "{MARK}', "line 2, column 18: the syntax is not valid here"),
        (f"start: a\na: /({MARK}/", "line 2, column 4: a regular expression cannot be followed: unclosed group"),
        ('start: a{3,1}\na: "x"', "line 1, column 8: the end of a repetition is below its start"),
        ('start: a\na: "x"\na: "y"', "line 3, column 4: the rule is defined twice"),
        (f"start: T\nT: /{MARK}/ T", "line 2, column 4: the terminal refers to itself"),
        (f'%import common.{MARK.upper()}\nstart: "a"', "line 1, column 1: the imported terminal does not exist"),
        (f'%declare {MARK.lower()}\nstart: "a"', "line 1, column 1: this form of Lark is not supported"),
        (f'start: "a"\nb: %json {{"{MARK}"', "what is behind a % is not valid JSON"),
        (f'start: a\na: %json {{"type": "{MARK}"}}', "line 2, column 4: a JSON schema cannot be followed: type must be one of"),
        (f'{MARK.lower()}: "y"', "no rule has the name start"),
        (f"start: @{MARK}", "a grammar that it refers to does not exist"),
        (f'start: "a" (\n  "{MARK}"', "line 1, column 13: the syntax is not valid here"),
    ],
)  # fmt: skip
def test_an_error_of_lark_names_line_and_column(source: str, expected: str) -> None:
    assert reason(lark_grammar(source)).startswith(expected)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'root ::= ("{MARK}"', "line 1, column 22: a group is not closed"),
        (f'root ::= "é" {MARK}\nb ::= "{MARK}"', "line 1, column 14: a rule has no definition"),
        (f'root ::= b\n# {MARK}\nb ::= "{MARK}', "line 3, column 17: the text ends within quotes or brackets"),
        ('root ::= "a"\nb ::= "\\q"', "line 2, column 9: an escape sequence is not valid"),
        (f'root = "{MARK}"\nb ::= "c"', "line 1, column 6: ::= is missing"),
        ('root ::= "a"{', "line 1, column 14: a repetition must have a number here"),
        (
            f"root ::= {MARK}-a\n{MARK}-a ::= root\n{MARK}_a ::= root",
            "two rules have the same name but for case, - and _",
        ),
        (f'{MARK} ::= "a"', "it must have a rule named root"),
        ('root ::= "\\', "line 1, column 12: an escape sequence is not complete"),
        ("root ::= " + "(" * 5000, "it is nested too deep"),
    ],
)
def test_an_error_of_gbnf_names_line_and_column(source: str, expected: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        lark_grammar(source)
    assert refused.value.message == f"is not valid GBNF: {expected}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'root ::= b | (c |\n\n "{MARK}")\nb ::= "d ::= e" # f ::= g\nc ::= "x"{{3,1}}', "line 5: the end of a repetition"),
        (f'# a ::= b\nroot ::= "{MARK}" | b\nb ::= [z-a]', "line 3: a regular expression cannot be followed: invalid"),
    ],
)  # fmt: skip
def test_an_error_that_gbnf_has_as_lark_names_the_line_of_its_rule(source: str, expected: str) -> None:
    assert reason(lark_grammar(source)).startswith(expected)


def test_gbnf_that_takes_too_long_to_convert_is_refused_before() -> None:
    rules = "".join(f'r{i} ::= "{MARK}{"x" * 40}" r{i + 1}\n' for i in range(600))
    with pytest.raises(InvalidParameter) as refused:
        lark_grammar(f'root ::= r0\n{rules}r600 ::= "a"\n')
    assert refused.value.message == "in GBNF, the number of rules times that of characters may be at most 8388608"
    some = "".join(rules.splitlines(keepends=True)[:150])
    assert "gbnf_lines" in checked_grammar(lark_grammar(f'root ::= r0\n{some}r150 ::= "a"\n'), "field")


@pytest.mark.parametrize(
    ("grammar", "param"),
    [
        (regex_grammar("(a{1000}){1000}"), "field"),  # as long to match on rank 0 as 1,500 steps of a small model
        (lark_grammar("start: A\nA: /(a{1000}){1000}/"), "field"),
        (json_schema_grammar({"type": "string", "pattern": "^(a{1000}){1000}$"}), "field.schema"),
        (json_schema_grammar({"properties": {f"p{i}": {"type": "string"} for i in range(1100)}}), "field.schema"),
    ],
)
def test_a_grammar_that_takes_too_long_to_match_is_refused_before_rank_0_has_it(grammar: str, param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        checked_grammar(grammar, "field", "field.schema")
    assert refused.value.message == f"{param}: is too large or too complex to be followed"
    assert refused.value.param == param


CIRCLES: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"anyOf": [{"$ref": "#"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
]


@pytest.mark.parametrize("by", [IN_FULL, BRIEFLY])
@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (lark_grammar("start: start"), "field: no text follows it"),
        (lark_grammar("root ::= root"), "field: no text follows it"),
        (lark_grammar("start: a\na: b\nb: a"), "field: no text follows it"),
        (regex_grammar(r"a[^\s\S]"), "field: no text follows it"),
        *((json_schema_grammar(schema), "field.schema: no value satisfies it") for schema in CIRCLES),
    ],
)
def test_a_grammar_that_nothing_follows_is_refused_before_rank_0_has_it(grammar: str, message: str, by: Checks) -> None:
    with pytest.raises(InvalidParameter) as refused:
        by.checked_grammar(grammar, "field", "field.schema")
    assert refused.value.message == message
    assert refused.value.param == message.partition(":")[0]


@pytest.mark.parametrize("grammar", [lark_grammar('start: ""'), lark_grammar('start: "a" | start'), regex_grammar("")])
def test_a_grammar_that_an_empty_or_a_short_text_follows_is_not_empty(grammar: str) -> None:
    checked_grammar(grammar, "field")


@pytest.mark.parametrize("source", ['start: <secret> "a"', 'start: "a"{1,100000}', "start: /a{0,20000}/"])
def test_a_grammar_within_the_limits_is_followed(source: str) -> None:
    checked_grammar(lark_grammar(source), "field")


def test_a_terminal_may_have_more_alternatives_than_a_rule() -> None:
    columns = " | ".join(f'"column {i}"' for i in range(2000))
    checked_grammar(lark_grammar(f"start: COLUMN+\nCOLUMN: {columns}"), "field")
    checked_grammar(lark_grammar(f"root ::= column+\ncolumn ::= {columns}"), "field")
    with pytest.raises(InvalidParameter, match="too large or too complex"):
        checked_grammar(lark_grammar(f"start: column+\ncolumn: {columns}"), "field")


def test_as_many_choices_as_a_request_may_have_are_followed() -> None:
    checked_grammar(choice_grammar([f"choice {i}" for i in range(1024)]), "field")


def _union(num_classes: int, num_shared: int) -> dict[str, object]:
    """A list of objects of one of the classes, which have optional properties in common."""
    shared: dict[str, object] = {f"shared_{i}": {"type": ["string", "number", "null"]} for i in range(num_shared)}
    classes = [{"type": "object", "properties": {**shared, f"own_{i}": {"type": "string"}}} for i in range(num_classes)]
    return {"type": "array", "items": {"anyOf": classes}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (_union(40, 15), '[{"shared_0":1,"shared_7":"x","own_3":"y"}]'),
        (
            {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(340)}}
            | {"additionalProperties": False},
            '{"field_0":"a","field_300":"b"}',
        ),
    ],
    ids=["a union of classes", "optional properties"],
)
def test_a_schema_of_many_alternatives_is_followed_to_its_end(schema: dict[str, object], text: str) -> None:
    grammar = checked_grammar(json_schema_grammar(schema), "field")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits(grammar))
    assert matcher.try_consume_tokens(list(text.encode())) == len(text), matcher.get_error()
    assert matcher.is_accepting()


def test_an_ambiguous_grammar_ends_before_a_token_takes_long() -> None:
    """Without a limit, masks take ever longer: 40 ms of processor time behind 200 tokens."""
    source = 'start: s\ns: (s | "a") (s | "a") (s | "b")? (s | "a")? | "a"'
    grammar = checked_grammar(lark_grammar(source), "field")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits(grammar))
    assert matcher.try_consume_tokens([ord("a")] * 100) == 100
    assert matcher.try_consume_tokens([ord("a")] * 50) < 50 and is_beyond_limits(matcher.get_error())


@pytest.mark.parametrize(
    "problem",
    [
        "lexer error: too many expressions constructed\n<non-verbose/>",
        "Parser Error: Current row has 2004 items; max is 2000",
    ],
)
def test_a_matcher_beyond_its_limits_is_no_error_of_syntax(problem: str) -> None:
    assert lark_words(problem, str) == "the grammar is too large or too complex"


@pytest.mark.parametrize(
    "text", ["x" + "\n" * 150_000, "a " * 100_000, "x ::=\n" * 30_000, '"\\' * 100_000, "x ::=" + '"\\' * 100_000]
)
@pytest.mark.timeout(60)
def test_text_without_end_is_no_work(text: str) -> None:
    """Squared, it would be minutes."""
    if is_gbnf(text):
        rule_lines(text)


def test_a_grammar_that_is_no_list_of_grammars_is_refused_without_its_text() -> None:
    for grammar in (
        f'{{"{MARK}": 1}}',
        f'{{"grammars": "{MARK}"}}',
        f"start: {MARK.lower()}",
        f'{{"grammars": [{{"{MARK}": 1}}]}}',
    ):
        assert MARK.lower() not in reason(grammar).lower()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.text(alphabet=st.sampled_from("(){}[]|*+?\\/^$.:%\"'<>@&~#-,01 \nab="), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_no_error_repeats_the_source(text: str, is_before: bool, is_regex: bool) -> None:
    text = MARK.lower() + text if is_before else text + MARK.lower()
    for source in (text, f"start: {text}", f'start: "a"\n{text}', f"root ::= {text}"):
        refused = None
        try:
            checked_grammar(regex_grammar(source) if is_regex else lark_grammar(source), "field")
        except InvalidParameter as error:
            refused = error
        assert refused is None or MARK.lower() not in refused.message.lower()


def test_what_was_checked_is_kept_and_what_was_refused_too() -> None:
    asked, refusals = [], []

    @kept
    def check(by: Checks, grammar: str, param: str) -> str:
        asked.append(grammar)
        if grammar == "bad":
            raise InvalidParameter(f"{param}: is bad", param=param)
        return grammar.upper()

    for _ in range(2):
        assert check("key a", IN_FULL, "good", "x") == "GOOD"
        with pytest.raises(InvalidParameter, match="x: is bad") as refused:
            check("key a", BRIEFLY, "bad", "x")
        refusals.append(refused.value)
    assert asked == ["good", "bad"] and [each.param for each in refusals] == ["x", "x"]
    # An exception that was kept itself would hold the frames of every time that it was raised.
    assert refusals[0] is not refusals[1]
    assert check("key b", IN_FULL, "good", "x") == "GOOD"
    assert asked == ["good", "bad", "good"], "the time would tell key b what key a has sent"
