"""Grammars that a caller of the handle gives, and the arguments of the functions that make them."""

from collections.abc import Callable
from typing import Any

import pytest

from llama_core.errors import InvalidParameter
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.callers_grammar import callers_grammar
from llama_core.text.grammar import (
    checked_grammar,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

LARK = 'start: "a"'


@pytest.mark.parametrize(
    "grammar",
    [
        "{}",
        "{" * 5000,
        '{"grammars": {}}',
        '{"grammars": []}',
        '{"grammars": [1]}',
        '{"json_schema": {"type": "object"}}',
        '{"gbnf": "root ::= 1"}',
        '{"grammars": [{"lark_grammar": "x"}], "gbnf_lines": ["a"]}',
        '{"grammars": [{"lark_grammar": "x", "name": "regex"}], "regex": 3}',
        '{"grammars": [{"json_schema": {}}], "unique_lists": 3}',
        '{"grammars": [{"json_schema": {}}',
    ],
)
def test_a_grammar_of_another_form_is_refused_with_the_builders_names(grammar: str) -> None:
    with pytest.raises(InvalidParameter, match="grammar: must be what json_schema_grammar") as refused:
        callers_grammar(grammar)
    assert refused.value.param == "grammar"


def test_what_the_builders_return_is_taken_as_it_is_and_lark_too() -> None:
    built = [
        json_schema_grammar({"type": "integer"}),
        regex_grammar("a\n+"),
        choice_grammar(["a"]),
        lark_grammar(LARK),
        lark_grammar('root ::= "a"'),
    ]
    for grammar in built:
        assert checked_grammar(callers_grammar(grammar), "grammar")
        assert callers_grammar(grammar) == grammar
    assert callers_grammar(LARK) == lark_grammar(LARK)


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (regex_grammar, "\ud800"),
        (regex_grammar, 3),
        (lark_grammar, "\ud800"),
        (lark_grammar, None),
        (choice_grammar, ["a", "\ud800"]),
        (choice_grammar, [1]),
        (choice_grammar, []),
        (choice_grammar, "ab"),
        (choice_grammar, 3),
    ],
)
def test_a_builder_refuses_what_is_no_text(build: Callable[[Any], str], given: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"must be a (text|list)"):
        build(given)


@pytest.mark.parametrize(("grammar", "says"), [("a\ud800", "lone surrogates"), (3, "must be a text")])
def test_sampling_params_refuse_a_grammar_that_is_no_text(grammar: Any, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as refused:
        SamplingParams(grammar=grammar)
    assert refused.value.param == "grammar"
