"""Finds out whether a grammar compiles, within limits that bound its check to about 0.4 s of processor time.

llguidance leaves Python's interpreter lock to other threads while it compiles.
"""

import contextlib
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from fractions import Fraction
from functools import cache, partial
from typing import Any, Final, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from llama_core.errors import InvalidParameter
from llama_core.grammar.closed_objects import closed_objects
from llama_core.grammar.shared_cache import SharedCache

MAX_BYTES: Final = 3 * 2**16  # of a grammar, as in `SamplingParams.grammar`
_KEPT: Final = SharedCache[tuple[str, str]](2**24)  # outcomes: clients send the same schema with every request
_STACK_BYTES: Final = 2**28

# Bounds of what llguidance's limits do not bound; at each the check takes less than 0.1 s.
_MOST_GBNF_WORK: Final = 2**22  # rules times characters: the converter is quadratic
_MOST_OPERATORS: Final = 8  # "&" and "~" in Lark: the time doubles with each
# Alternatives that the parser may predict at one place, where its time is cubic. Of JSON, a place has few.
_MOST_PREDICTED: Final = 2**16
_MOST_PREDICTED_OF_JSON: Final = 2**18
_MOST_JOINED_PATTERNS: Final = 12  # the same for patterns of a JSON schema that must match one text
_MOST_PATTERN_PROPERTIES: Final = 100  # cubic
_MOST_MULTIPLE: Final = 10_000  # the least common multiple of all multipleOf, without its decimal point

_GBNF_RULE: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_CODE: Final = re.compile(r"(\\\\)|\\u([0-9a-fA-F]{4})|\\U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})")
# Also without its end, which a search from each beginning would take quadratic time for.
_LARK_TEXT: Final = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?://|#).*')
_LARK_OPERATOR: Final = re.compile(r"&|~(?!\s*\d)")  # not "a" ~ 5, a number of times
_LARK_RULE: Final = re.compile(r"^[ \t]*[?!]*([a-z_]\w*)\b[^:\n]*:", re.MULTILINE)
_COMPOSES: Final = {"allOf", "anyOf", "oneOf", "$ref"}
_CONSTRAINS: Final = _COMPOSES | {
    "pattern",
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
}

# Of llguidance's messages: the place, the reason of a regular expression's error, and what repeats the grammar.
_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REGEX_ERROR: Final = re.compile(r"regex parse error:.*\nerror: ([^\n]*)", re.DOTALL)
_REPEATED: Final = re.compile(r"(?:, got |(?<=type): |(?<=format): |:\s+\().*|(['\"`/])(.*)\1")
_KEYWORDS: Final = frozenset(
    {"additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies", "dependentRequired", "dependentSchemas",
     "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems", "maxLength",
     "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not",
     "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type",
     "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef", "$ref"}
)  # fmt: skip
_REASON_CHARS: Final = 200

Result = TypeVar("Result")


def limits(*, is_followed: bool = False) -> LLParserLimits:
    """llguidance's limits of time and memory. is_followed: of rank 0, whose vocabulary takes more than the check's bytes."""
    times = 3 if is_followed else 1
    return LLParserLimits(
        max_items_in_row=1_500,  # an optional property takes up to four; a mask over as many takes 10 ms
        initial_lexer_fuel=100_000 * times,
        step_lexer_fuel=33_000 * times,
        step_max_items=10_000 * times,
        max_lexer_states=20_000,
        max_grammar_size=10_000 * times,  # 2,500 properties, or an enum of 800 objects; compiles in 0.1 s
        verbose_errors=False,
    )


def checked(grammar: str, param: str, scope: str = "") -> str:
    """The grammar as rank 0 follows it: with Lark in place of GBNF, and a schema's objects closed. scope: results are kept for
    each scope alone.

    Raises InvalidParameter that names `param`, with llguidance's reason, unless the grammar compiles within the limits."""
    if len(grammar.encode(errors="replace")) > MAX_BYTES:
        raise InvalidParameter.of(param, f"must make a grammar of at most {MAX_BYTES} bytes")
    followed, fault = _KEPT.find_or_make(scope, grammar, partial(_outcome, grammar))
    if fault:
        raise InvalidParameter.of(param, fault)
    return followed


def _outcome(grammar: str) -> tuple[str, str]:
    """The grammar to follow, and why it is refused, or ""."""
    try:
        followed = _with_closed_objects(_without_gbnf(grammar))
        return followed, _unbounded(followed) or in_background(lambda: _fault(followed))
    except RecursionError:
        return grammar, "is nested too deep"
    except InvalidParameter as error:
        return grammar, error.message


def in_background(work: Callable[[], Result]) -> Result:
    """What `work` returns, from a thread of the lowest priority, because streams and ranks need the processors more.

    The thread has a large stack: llguidance recurses from rule to rule, and 14,000 rules in a chain need 100 MB."""
    done: Future[Result] = Future()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            done.set_result(work())
        except BaseException as error:  # also a panic of llguidance, which is no Exception
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    with _STACK_SIZE:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return done.result()


_STACK_SIZE: Final = threading.Lock()  # of new threads, for the whole process


def _fault(grammar: str) -> str:
    """Why a matcher of the grammar fails up to the first token, or ""."""
    try:
        matcher = LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=limits())
    except ValueError as error:  # the text is no JSON, or of another form
        return reason(str(error))
    if not matcher.is_error():
        allowed = [byte for byte, bias in enumerate(matcher.compute_logit_bias()) if bias]
        matcher.try_consume_tokens(allowed[-1:])  # "{" rather than a space
        matcher.compute_ff_tokens()
    problem = matcher.get_error()
    if "special token" in problem or "Token range" in problem:  # those of the model are known to rank 0 alone
        return ""
    # The builders name what they write, in which a place would say nothing to the client.
    return reason(problem, has_place='"name": ' not in grammar)


@cache
def byte_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def reason(problem: str, *, has_place: bool = False) -> str:
    """llguidance's message in one line, without what it repeats of the grammar. has_place: with line and column."""
    place = _PLACE.match(problem)
    words = (problem[place.end() :] if place is not None else problem).removeprefix("failed to compile JSON schema: ")
    found = _REGEX_ERROR.search(words)
    words = f"invalid regular expression: {found[1]}" if found is not None else words.partition("\n")[0]
    if words.startswith("NoExtension"):
        return "no text follows it"
    words = _REPEATED.sub(lambda each: each[0] if _are_keywords(each[2]) else "...", words)[:_REASON_CHARS]
    return f"line {place[1]}, column {place[2]}: {words}" if place is not None and has_place else words


def _are_keywords(repeated: str | None) -> bool:
    return repeated is not None and set(re.split("[\"'], [\"']", repeated)) <= _KEYWORDS


def _without_gbnf(grammar: str) -> str:
    """The grammar with Lark in place of GBNF. Raises InvalidParameter or RecursionError."""
    source = next(iter(_sources(grammar, json.JSONDecoder())), "")
    num_rules = len(_GBNF_RULE.findall(source))
    if not num_rules:
        return grammar
    if num_rules * len(source) > _MOST_GBNF_WORK:
        raise InvalidParameter(
            f"in GBNF, the number of rules times that of characters may be at most {_MOST_GBNF_WORK}"
        )
    source = _GBNF_CODE.sub(lambda code: code[1] or chr(int(code[2] or code[3], 16)), source)
    try:
        return json.dumps({"grammars": [{"name": "gbnf", "lark_grammar": gbnf_to_lark(source)}]})
    except RecursionError:
        raise
    except Exception as error:  # the converter raises several types
        raise InvalidParameter(f"is not valid GBNF: {reason(str(error))}") from None


def _with_closed_objects(grammar: str) -> str:
    """The grammar of a JSON schema with its objects closed; others as they are. Raises InvalidParameter or RecursionError."""
    try:
        first, *others = json.loads(grammar)["grammars"]
        schema = first["json_schema"]
    except (ValueError, TypeError, KeyError):
        return grammar
    return json.dumps({"grammars": [{**first, "json_schema": closed_objects(schema)}, *others]})


def _sources(grammar: str, decoder: json.JSONDecoder) -> list[str]:
    """What is written in Lark. Raises RecursionError."""
    try:
        return [str(each.get("lark_grammar") or "") for each in decoder.decode(grammar)["grammars"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # llguidance says what is wrong


def _unbounded(grammar: str) -> str:
    """Why llguidance's limits do not bound the time of the check, or "". Raises RecursionError."""
    objects: list[dict[str, Any]] = []

    def noted(each: dict[str, Any]) -> dict[str, Any]:
        objects.append(each)
        return each

    decoder = json.JSONDecoder(object_hook=noted)
    sources = _sources(grammar, decoder)
    for source in sources:
        for found in re.finditer(r"%json\s*", source):
            with contextlib.suppress(ValueError):  # within a text
                decoder.raw_decode(source, found.end())
    return _unbounded_lark([_LARK_TEXT.sub('""', source) for source in sources]) or _unbounded_json(objects)


def _unbounded_lark(sources: list[str]) -> str:
    if sum(len(_LARK_OPERATOR.findall(source)) for source in sources) > _MOST_OPERATORS:
        return f"may have at most {_MOST_OPERATORS} operators & and ~"
    num_predicted = 0
    for source in sources:
        references = Counter(re.findall(r"\w+", source))
        _, *rules = _LARK_RULE.split(source)
        for name, alternatives in zip(rules[::2], rules[1::2], strict=True):
            num_predicted += references[name] * alternatives.count("|")
    if num_predicted > _MOST_PREDICTED:
        return f"the references to each rule times its alternatives may be at most {_MOST_PREDICTED} together"
    return ""


def _unbounded_json(objects: list[dict[str, Any]]) -> str:
    num_references = sum("$ref" in each for each in objects)
    lists = (each.get(name) for each in objects for name in ("anyOf", "oneOf"))
    if (
        num_references * max((len(each) for each in lists if isinstance(each, list)), default=0)
        > _MOST_PREDICTED_OF_JSON
    ):
        return f"the number of all $ref times the length of an anyOf or oneOf may be at most {_MOST_PREDICTED_OF_JSON}"
    if sum(len(each["patternProperties"]) for each in objects if isinstance(each.get("patternProperties"), dict)) > (
        _MOST_PATTERN_PROPERTIES
    ):
        return f"may have at most {_MOST_PATTERN_PROPERTIES} patternProperties"
    num_patterns = sum(isinstance(each.get("pattern"), str) for each in objects)
    if num_patterns > _MOST_JOINED_PATTERNS and any(map(_joins, objects)):
        return (
            f"with more than {_MOST_JOINED_PATTERNS} patterns, it cannot have allOf, nor other constraints beside anyOf, oneOf "
            "or $ref"
        )
    if not _is_small_multiple(each["multipleOf"] for each in objects if type(each.get("multipleOf")) in (int, float)):
        return f"the least common multiple of all multipleOf may be at most {_MOST_MULTIPLE}, without its decimal point"
    return ""


def _joins(schema: dict[str, Any]) -> bool:
    """Whether a text may have to follow several parts of the schema at once."""
    return "allOf" in schema or (not _COMPOSES.isdisjoint(schema) and len(_CONSTRAINS & schema.keys()) > 1)


def _is_small_multiple(values: Iterable[float]) -> bool:
    multiple = Fraction(1, 10**400)  # divides every double
    for value in values:
        # It may have more digits than a float, or than text.
        if isinstance(value, int) and abs(value) > _MOST_MULTIPLE:
            return False
        if not value or not math.isfinite(value):
            continue
        each = abs(Fraction(str(value)))
        multiple = Fraction(
            math.lcm(multiple.numerator, each.numerator), math.gcd(multiple.denominator, each.denominator)
        )
        if multiple > _MOST_MULTIPLE:
            return False
    while multiple.denominator > 1 and multiple < _MOST_MULTIPLE:  # the digits of 0.25 are those of 25
        multiple *= 10
    return multiple <= _MOST_MULTIPLE
