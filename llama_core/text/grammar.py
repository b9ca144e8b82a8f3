"""Grammars that an answer must follow, in the form that `llguidance.LLMatcher` reads: builders and checks.

A grammar is a JSON text with a list of grammars, of which the first is the answer's. The replica builds and checks it; rank 0
follows it token by token (`execution/grammars/masks.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Concatenate, Final, ParamSpec, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from llama_core.errors import InvalidParameter
from llama_core.shared_cache import SharedCache
from llama_core.text import gbnf
from llama_core.text.grammar_cost import BRIEF_CHARS, may_take_long
from llama_core.text.grammar_words import is_beyond_limits, is_empty, lark_reason, regex_fault
from llama_core.text.schema_faults import negative_multiple, schema_fault, schema_reason, unwritable_fault
from llama_core.text.schema_forms.rewriting import original_place, refused_keywords, rewritten
from llama_core.text.schema_forms.unique_lists import without_unique_lists
from llama_core.text.schema_numbers import bounded_schema
from llama_core.text.schema_rules import MAX_CHARS, Spacing, schema_rules
from llama_core.text.tokenizer import Tokenizer, is_encodable

# Between the parts of JSON: one space, or a new line with its indentation. Unlimited, a model may write spaces for ever.
_WHITESPACE: Final = r"( |\n[ \t]{0,32})?"
_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": _WHITESPACE, "item_separator": ",", "key_separator": ":"}
_SPACING: Final = Spacing(
    header='%llguidance {"ignore_once": true}\n%ignore /' + _WHITESPACE + "/",
    comma='","',
    colon='":"',
    options=_JSON_OPTIONS,
)
TOO_LARGE: Final = "is too large or too complex to be followed"
_LIMIT_WORDS: Final = re.compile(r"fuel|limit|too (?:large|big|complex|many)|Unable to determine", re.IGNORECASE)
_KEPT_BYTES: Final = 2**25  # of the outcomes of one kind of check
_P = ParamSpec("_P")


class TakesLong(Exception):
    """A brief check has not found out whether a grammar is within its limits."""


def limits(grammar: str = "", *, is_brief: bool = False) -> LLParserLimits:
    """Limits of llguidance's time and memory for the grammar: about 0.1 s to compile it and for its first token, mostly 20 ms
    for a later token, and 40 MB. is_brief: a third of these.

    A row of its Earley parser has up to four items for each optional property that may come next, in each member of `anyOf`. A
    mask over 1,500 such items takes 10 ms, and few vocabularies can follow more. In ambiguous grammars a row has some items for
    each earlier token, and a mask takes longer: up to 0.3 s where `s: s s | "a"` reaches 1,200 items.
    """
    return LLParserLimits(
        max_items_in_row=1_500 if json_description(grammar) else 1_200,
        initial_lexer_fuel=100_000 if is_brief else 300_000,
        step_lexer_fuel=33_000 if is_brief else 100_000,
        step_max_items=10_000 if is_brief else 30_000,
        max_lexer_states=20_000,
        max_grammar_size=33_000 if is_brief else 100_000,
        verbose_errors=False,
    )


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """JSON that the schema describes. `checked_grammar` finds out whether every keyword of the schema
    is known, and limits its numbers.

    Raises InvalidParameter, whose `param` is the place within the schema, for false, and for a schema that is no JSON or is
    nested too deep.
    """
    if schema is False:
        raise InvalidParameter("no value satisfies false", param="")
    schema = {} if schema is True else schema  # llguidance's options need an object
    try:
        written = json.dumps(schema)
        grammar = LLMatcher.grammar_from_json_schema(written, overrides=_JSON_OPTIONS)
        if '"multipleOf": -' not in written or (negative := negative_multiple(schema)) is None:
            return grammar
        fault = negative
    except (ValueError, RecursionError) as error:
        fault = unwritable_fault(schema, error)
    raise InvalidParameter(fault.reason, param=fault.place)


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(regex: str) -> str:
    """Text that the regular expression matches as a whole. Rust's syntax, without look-around and back-references.

    Raises InvalidParameter where it is no text."""
    _check_text(regex)
    grammar: str = LLMatcher.grammar_from_regex(regex)
    if len(regex_to_lark(regex, "")) == len(regex):
        return grammar
    # Some characters are escaped there. The source tells where an error is; llguidance reads "grammars" alone.
    return json.dumps({**json.loads(grammar), "regex": regex})


def choice_grammar(choices: Sequence[str]) -> str:
    """Exactly one of the texts. Raises InvalidParameter where these are no texts, or none."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise InvalidParameter("must be a list of at least 1 text", param="")
    for choice in choices:
        _check_text(choice)
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(source: str) -> str:
    """A context-free grammar in Lark's notation or in GBNF, llama.cpp's. Raises InvalidParameter for GBNF with an error, and
    for what is no text.

    GBNF takes up to a second of processor time.
    """
    _check_text(source)
    if not gbnf.is_gbnf(source):
        return json.dumps({"grammars": [{"lark_grammar": source}]})
    # The lines are for errors; llguidance reads "grammars" alone.
    return json.dumps({"grammars": [{"lark_grammar": gbnf.as_lark(source)}], "gbnf_lines": gbnf.rule_lines(source)})


def _check_text(text: object) -> None:
    if not isinstance(text, str) or not is_encodable(text):
        raise InvalidParameter("must be a text without lone surrogates", param="")


def for_answer(grammar: str, tokenizer: Tokenizer) -> str:
    """The grammar, with the space that `tokenizer.decode` drops from the beginning of a text allowed before it."""
    if tokenizer.leading_space == "keep":
        return grammar
    first, *others = json.loads(grammar)["grammars"]
    start = {"lark_grammar": 'start: " "? @answer'}
    made = [start, first | {"name": "answer"}, *others]
    return _beside_schema(made, schema_of(grammar), unique_lists_of(grammar))


def checked_grammar(
    grammar: str, param: str, schema_param: str = "", *, is_whole: bool = True, is_brief: bool = False
) -> str:
    """The grammar in the form in which an answer follows it: numbers of JSON schemas have a limited length (`schema_numbers`).

    Raises InvalidParameter that names `param` and the place unless the grammar compiles within the limits; `schema_param`
    instead where that is the place of a JSON schema. is_whole: nothing comes before the answer, so that the items of its lists
    can be kept distinct (`unique_lists_of`). Takes processor time: 2 ms for most, up to 0.1 s, twice as much for an error, and
    up to a second for a grammar that is too large. is_brief: raises TakesLong where that may be over 60 ms.
    """
    if is_brief and may_take_long(grammar):
        raise TakesLong
    problem = _problem(grammar, is_brief)
    followed = _rewritten(grammar, is_whole, is_brief) if problem else _bounded(grammar, is_brief) or grammar
    if followed is None:
        raise _refusal(grammar, problem, param, schema_param or param, is_whole)
    if reason := _fault_of_first_token(followed, is_brief):
        place = param if schema_of(grammar) is None else schema_param or param
        raise InvalidParameter(f"{place}: {reason}", param=place)
    return followed


def compiled(grammar: str, param: str) -> str:
    """The grammar, which compiles. A process with limits of time and memory (`check_process`) raises InvalidParameter that
    names `param` where it does not."""
    LLMatcher(_bytes(), grammar, log_level=0, limits=limits(grammar))
    return grammar


class Checks(Protocol):
    """How the grammar of a request is checked: by this module, or elsewhere."""

    def checked_grammar(self, grammar: str, param: str, schema_param: str = "", *, is_whole: bool = True) -> str: ...

    def lark_grammar(self, source: str) -> str: ...

    def compiled(self, grammar: str, param: str) -> str: ...


class InFull:
    """Here, whatever the time."""

    checked_grammar = staticmethod(checked_grammar)
    lark_grammar = staticmethod(lark_grammar)
    compiled = staticmethod(compiled)


class Briefly:
    """Here, in up to 60 ms of processor time; TakesLong where that does not suffice."""

    checked_grammar = staticmethod(partial(checked_grammar, is_brief=True))

    @staticmethod
    def lark_grammar(source: str) -> str:
        if gbnf.is_gbnf(source) and len(source) > BRIEF_CHARS:
            raise TakesLong
        return lark_grammar(source)

    @staticmethod
    def compiled(grammar: str, param: str) -> str:
        if may_take_long(grammar):
            raise TakesLong
        return compiled(grammar, param)


IN_FULL: Final[Checks] = InFull()
BRIEFLY: Final[Checks] = Briefly()


def kept(check: Callable[Concatenate[Checks, _P], str]) -> Callable[Concatenate[str, Checks, _P], str]:
    """`check` with a cache of its latest results, because clients send the same schema with every request. The cache holds
    refusals too, because some take longer than any accepted grammar. All `Checks` have the same results.

    The first argument is the scope: a result of another scope is not used, because the time would tell of it."""
    outcomes = SharedCache[str | InvalidParameter](_KEPT_BYTES)

    def checked(scope: str, by: Checks, /, *args: _P.args, **kwargs: _P.kwargs) -> str:
        def outcome() -> str | InvalidParameter:
            try:
                return check(by, *args, **kwargs)
            except InvalidParameter as refusal:
                return refusal.with_traceback(None)

        found = outcomes.find_or_make(scope, (args, *sorted(kwargs.items())), outcome)
        if isinstance(found, InvalidParameter):
            # A new exception, because one that is raised again keeps the frames of every earlier raise.
            raise InvalidParameter(found.message, param=found.param)
        return found

    return checked


def _fault_of_first_token(grammar: str, is_brief: bool = False) -> str:
    """Why a matcher of the grammar fails by the first token: nothing follows the grammar, or it exceeds its limits; else "".

    On rank 0 a matcher that exceeds its limits would delay the tokens of every request. `validate_grammar` finds neither: it
    builds no lexer states, which take most of the time."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits(grammar, is_brief=is_brief))
    if not matcher.is_error():
        allowed = [byte for byte, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if matcher.is_error() and is_empty(matcher.get_error()):
            return "no text follows it" if schema_of(grammar) is None else "no value satisfies it"
        matcher.try_consume_tokens(allowed[-1:])  # "{" rather than a space
        matcher.compute_ff_tokens()
    if is_brief and matcher.is_error() and _LIMIT_WORDS.search(matcher.get_error()):
        raise TakesLong
    return TOO_LARGE if matcher.is_error() and is_beyond_limits(matcher.get_error()) else ""


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of bytes."""
    return LLTokenizer("byte")


def _bounded(grammar: str, is_brief: bool) -> str | None:
    """The grammar of a JSON schema with numbers of a limited length; None where it cannot be followed so, or is another one."""
    if '"json_schema"' not in grammar:
        return None
    first, *others = json.loads(grammar)["grammars"]
    if (schema := first.get("json_schema")) is None:
        return None
    bounded = [json.dumps({"grammars": [first | {"json_schema": bounded_schema(schema)}, *others]})]
    if (rules := schema_rules(schema, _SPACING)) is not None:
        bounded.insert(0, _beside_schema([{"lark_grammar": rules}, *others], schema))
    # An optional part that no value satisfies, for one, compiles in the schema alone.
    return next((each for each in bounded if len(each) < MAX_CHARS and not _problem(each, is_brief)), None)


def _rewritten(grammar: str, is_whole: bool, is_brief: bool) -> str | None:
    """The grammar of a JSON schema that llguidance refuses, in a form that it follows (`schema_forms`)."""
    if '"json_schema"' not in grammar:
        return None
    first, *others = json.loads(grammar)["grammars"]
    if (schema := rewritten(first.get("json_schema"), keeps_unique=is_whole)) is None:
        return None
    schema, lists = without_unique_lists(schema)
    if _problem(_of_schema({key: schema[key] for key in ("x-guidance",) if key in schema})):
        return None
    grammar = json.dumps({"grammars": [first | {"json_schema": schema}, *others]})
    followed = _bounded(grammar, is_brief) or (grammar if not _problem(grammar, is_brief) else None)
    if followed is None or lists is None:
        return followed
    followed = json.dumps(json.loads(followed) | {"unique_lists": lists})
    return followed if len(followed) < MAX_CHARS else None


def _of_schema(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _beside_schema(grammars: Sequence[Any], schema: Any, lists: Any = None) -> str:
    """The grammars' text. The schema stays beside them for those who read it: llguidance reads "grammars" alone.

    lists: `unique_lists_of`."""
    beside = {"json_schema": schema, "unique_lists": lists}
    return json.dumps({"grammars": grammars} | {key: value for key, value in beside.items() if value is not None})


def schema_of(grammar: str) -> Any:
    """The JSON schema that the grammar was made from; None for another grammar."""
    if '"json_schema"' not in grammar:
        return None
    parsed = json.loads(grammar)
    return parsed.get("json_schema") or parsed["grammars"][0].get("json_schema")


def json_description(grammar: str) -> str:
    """What describes the JSON of a grammar whose text is JSON or calls of tools, or ends with them: the schemas' text; "" for
    other grammars."""
    if '"json_description"' in grammar and (description := json.loads(grammar).get("json_description")):
        return str(description)
    schema = schema_of(grammar)
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    return "" if schema is None else json.dumps(schema)


def is_of_schema(grammar: str) -> bool:
    """Whether all of the text is JSON of one schema, which `json_description` gives."""
    return '"json_description"' not in grammar and schema_of(grammar) is not None


def unique_lists_of(grammar: str) -> Any:
    """The lists of the schema whose items must be kept distinct (`schema_forms.unique_lists`); None where there are none."""
    return json.loads(grammar).get("unique_lists") if '"unique_lists"' in grammar else None


def begins_with_text(grammar: str) -> bool:
    """Whether other text may come before the JSON: reasoning, or an answer in which the model may call a tool."""
    return '"begins_with_text"' in grammar and bool(json.loads(grammar).get("begins_with_text"))


def described(grammars: Sequence[Any], description: str, *, begins_with_text: bool) -> str:
    """The grammars' text with what `json_description` and `begins_with_text` give; llguidance reads "grammars" alone."""
    return json.dumps(
        {"grammars": grammars, "json_description": description}
        | ({"begins_with_text": True} if begins_with_text else {})
    )


def _problem(grammar: str, is_brief: bool = False) -> str:
    problem = LLMatcher.validate_grammar(grammar, limits=limits(is_brief=is_brief))
    if is_brief and _LIMIT_WORDS.search(problem):
        raise TakesLong
    return "" if problem.startswith("WARNING") else problem


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raises InvalidParameter that names the place behind `param` unless llguidance compiles the schema."""
    grammar = json_schema_grammar(schema)
    if problem := _problem(grammar):
        raise _refusal(grammar, problem, param, param, is_whole=False)


def _refusal(grammar: str, problem: str, param: str, schema_param: str, is_whole: bool) -> InvalidParameter:
    """The problem, which quotes the grammar, with its place and in words of our own."""
    try:
        made = json.loads(grammar)
        first = dict(made["grammars"][0])
    except (ValueError, LookupError, TypeError):  # a text that a caller of the handle wrote
        made, first = {}, {"lark_grammar": grammar}
    if isinstance(schema := first.get("json_schema"), dict):
        options = {key: schema[key] for key in ("x-guidance",) if key in schema}
        if left_problem := _problem(_of_schema(left := refused_keywords(schema, keeps_unique=is_whole))):
            problem = left_problem
        fault = schema_fault(
            left if left_problem else schema, problem, lambda part: _problem(_of_schema(part | options))
        )
        fault = replace(fault, place=original_place(fault.place, schema))
        return InvalidParameter(fault.message(schema_param), param=schema_param + fault.place)
    source = str(first.get("lark_grammar", ""))
    if first.get("name") == "regex":
        regex = made.get("regex", source.removeprefix("start: /")[:-1])
        reason = regex_fault(problem, regex, lambda text: regex_to_lark(text, "")).reason
    elif (lines := made.get("gbnf_lines")) is not None:
        reason = gbnf.converted_reason(problem, source, lines)
    else:
        reason = lark_reason(problem, source, schema_reason)
    return InvalidParameter(f"{param}: {reason}", param=param)
