"""Grammars in GBNF, llama.cpp's notation, as grammars in Lark, and what is wrong with one, by its line."""

import re
from collections.abc import Sequence
from typing import Final

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from llama_core.errors import InvalidParameter
from llama_core.text.grammar_words import lark_place, lark_words

_RULE: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PART: Final = re.compile(
    r'(?s:"(?:\\.?|[^"\\])*(?:"|\Z)|\[(?:\\.?|[^\]\\])*(?:\]|\Z))|#[^\n]*|(?P<name>[\w-]+)(?P<defined>[ \t]*::=)?'
)
# Rules times characters: the converter takes up to 0.1 us for each, where every rule refers to the next one.
_MAX_WORK: Final = 2**23
_LARK_RULE: Final = re.compile(r"^[\w-]+:", re.MULTILINE)
_MISSING: Final = re.compile(r"Rule '([\w-]+)' not found")
# How the converter's message begins, and what is said instead: it quotes the source.
_WORDS: Final = (
    ("Expected name", "a rule, or a part of one, must begin here"),
    ("Expected integer", "a repetition must have a number here"),
    ("Expected ::=", "::= is missing"),
    ("Expected ',' or '}'", "a repetition must end with }"),
    ("Expected '}'", "a repetition must end with }"),
    ("Expected ')'", "a group is not closed"),
    ("Unexpected end of input", "the text ends within quotes or brackets"),
    ("Incomplete escape sequence", "an escape sequence is not complete"),
    ("Invalid", "an escape sequence is not valid"),
)


def is_gbnf(source: str) -> bool:
    """Whether the grammar is in GBNF rather than in Lark."""
    return _RULE.search(source) is not None


def as_lark(source: str) -> str:
    """The grammar in Lark's notation. Takes up to a second of processor time.

    Raises InvalidParameter that says where it has an error.
    """
    if len(rule_lines(source)) * len(source) > _MAX_WORK:
        raise InvalidParameter(f"in GBNF, the number of rules times that of characters may be at most {_MAX_WORK}")
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the converter raises several types
        problem = error
    raise InvalidParameter(f"is not valid GBNF: {_reason(problem, source)}")


def rule_lines(source: str) -> list[int]:
    """The line, from 1, of each rule."""
    lines, line, at = [], 1, 0
    for found in _PART.finditer(source):
        if found["defined"]:
            line, at = line + source.count("\n", at, found.start()), found.start()
            lines.append(line)
    return lines


def converted_reason(problem: str, source: str, lines: Sequence[int]) -> str:
    """What llguidance finds wrong with `source`, the grammar in Lark. lines: of its rules in GBNF, in order."""
    reason = lark_words(problem, lambda _: "")
    if (at := lark_place(problem)) is None:
        return reason
    rule = len(_LARK_RULE.findall("\n".join(source.split("\n")[: at[0]]))) - 1
    return f"line {lines[rule]}: {reason}" if 0 <= rule < len(lines) else reason


def _reason(problem: Exception, source: str) -> str:
    if isinstance(problem, GbnfToLarkError):
        words = next(
            (words for beginning, words in _WORDS if str(problem).startswith(beginning)), "the syntax is not valid"
        )
        return f"{_place(source, problem.pos.pos)}: {words}"
    if isinstance(problem, IndexError):  # the converter reads behind a \ at the end
        return f"{_place(source, len(source))}: an escape sequence is not complete"
    if isinstance(problem, RecursionError):
        return "it is nested too deep"
    if (missing := _MISSING.match(str(problem))) is not None:
        for found in _PART.finditer(source):
            if found["name"] == missing[1] and not found["defined"]:
                return f"{_place(source, found.start())}: a rule has no definition"
    if "already exists" in str(problem):
        return "two rules have the same name but for case, - and _"
    return "it must have a rule named root" if "'root'" in str(problem) else "it cannot be converted"


def _place(source: str, at: int) -> str:
    line_begin = source.rfind("\n", 0, at) + 1
    return f"line {source.count(chr(10), 0, at) + 1}, column {at - line_begin + 1}"
