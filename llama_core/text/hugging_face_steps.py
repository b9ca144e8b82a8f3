"""Bounds on the normalizers and pre-tokenizers of a tokenizer.json, checked before the `tokenizers` library reads them.

Some expressions take time that grows fast with the text, or more memory than there is, while they are compiled. Some
replacements make a text many times longer. This module refuses those by the name of the field.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llama_core.text.charsmap import check_charsmap
from llama_core.text.gguf_pretokenizers import PRE_TOKENIZERS

_MAX_STEPS: Final = 64
_MAX_DEPTH: Final = 8
_MAX_PATTERN_CHARS: Final = 20_000
_MAX_REPEATS: Final = 1000
MAX_GROWTH: Final = 16  # of a text's characters, by all replacements of the normalizer together
_MEMBERS: Final = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
# Of an expression: an escape, a class, where a group begins and ends, an alternative, a quantifier.
_SYNTAX: Final = re.compile(
    r"\\[a-zA-Z]\{[^}]*\}|\\.|\[\^?\]?|\(\?[^()\s]*?[:=!>]|\(|\)|\||[*+?]|\{\d*,?\d*\}", re.DOTALL
)
# The expressions of the families, whose cost is known.
_KNOWN: Final = frozenset(pattern for each in PRE_TOKENIZERS.values() for pattern in each.patterns)


def check_steps(content: Mapping[str, Any]) -> frozenset[str]:
    """The expressions of unknown cost. Raises ValueError that names the field."""
    growth = 1
    expressions: set[str] = set()
    for field in _MEMBERS:
        for number, step in enumerate(_steps(field, content.get(field), 0)):
            if number == _MAX_STEPS:
                raise ValueError(f"{field} has more than {_MAX_STEPS} steps")
            if step["type"] in ("Split", "Replace"):
                expressions |= _expressions(field, step)
            if field in ("normalizer", "pre_tokenizer"):
                growth *= _growth(step)
                if growth > MAX_GROWTH:
                    raise ValueError(f"{field} may make a text more than {MAX_GROWTH} times longer")
                if step.get("type") == "Precompiled":
                    check_charsmap(step.get("precompiled_charsmap"))
    return frozenset(expressions - _KNOWN)


def _steps(field: str, step: object, depth: int) -> Iterator[Mapping[str, Any]]:
    if step is None and depth == 0:
        return
    if not isinstance(step, dict) or not isinstance(step.get("type"), str) or depth > _MAX_DEPTH:
        raise ValueError(f"{field} is not a step with a type, or more than {_MAX_DEPTH} sequences deep")
    if step["type"] != "Sequence":
        yield step
        return
    members = step.get(_MEMBERS[field])
    if not isinstance(members, list):
        raise ValueError(f"{field} has a Sequence without {_MEMBERS[field]}")
    for member in members:
        yield from _steps(field, member, depth + 1)


def _growth(step: Mapping[str, Any]) -> int:
    """At most so many times longer is the text behind the step, in characters."""
    if step["type"] == "ByteLevel":
        return 2  # a character for each byte
    if step["type"] == "Prepend":
        return max(1, len(str(step.get("prepend"))))
    if step["type"] != "Replace":
        return 1
    pattern, put = step.get("pattern"), step.get("content")
    given = pattern.get("String") if isinstance(pattern, dict) else None
    length = len(put) if isinstance(put, str) else 0
    if isinstance(given, str):
        return max(1, -(-length // len(given)))
    return 1 + length  # an expression may match the empty text between any two characters


def _expressions(field: str, step: Mapping[str, Any]) -> set[str]:
    """The expression of a step that may have one."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1:
        raise ValueError(f"{field}: {step['type']} has no pattern")
    ((kind, text),) = pattern.items()
    if kind not in ("String", "Regex") or not isinstance(text, str) or not 0 < len(text) <= _MAX_PATTERN_CHARS:
        raise ValueError(f"{field}: the pattern of {step['type']} must have 1 to {_MAX_PATTERN_CHARS} characters")
    if kind == "Regex" and (problem := expression_problem(text)):
        raise ValueError(f"{field}: the pattern {text[:60]!r} {problem}")
    return {text} if kind == "Regex" else set()


def expression_problem(pattern: str) -> str | None:
    """Why the expression could take too long on some text, or too much memory; None if nothing of that is seen.

    A group with alternatives or quantifiers must not be repeated itself: there are exponentially many ways to match it.
    """
    groups = [False]  # for each open group: whether it has alternatives or quantifiers
    last: bool | None = None  # of what the next quantifier repeats: whether it is such a group
    at, was_quantifier = 0, False
    while (match := _SYNTAX.search(pattern, at)) is not None:
        token, is_adjacent = match[0], match.start() == at
        at = match.end()
        is_quantifier = token[0] in "*+?{" and token != "{,}"
        if not is_quantifier:
            was_quantifier = False
        if token[0] == "[":
            at, last = _class_end(pattern, at), False
        elif token[0] == "(":
            groups.append(False)
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] |= last
            continue
        elif token == "|":
            groups[-1] = True
        elif is_quantifier:
            if was_quantifier and is_adjacent:
                if token[0] in "*{":
                    return "repeats a repetition"
                continue  # lazy or possessive
            most = _most(token)
            if most > _MAX_REPEATS:
                return f"repeats more than {_MAX_REPEATS} times"
            if last and is_adjacent and most > 1:
                return "repeats a group that has alternatives or repetitions itself"
            groups[-1], was_quantifier = True, True
        last = False
    return None


def probes(expressions: frozenset[str]) -> Iterator[str]:
    """Texts of growing length that take long with expressions which try many ways to match."""
    written = sorted({char for each in expressions for char in each if char.isalnum()})[:8]
    for char in dict.fromkeys([*" a1.\n", *written]):
        for power in range(8):
            # The library tries no match on a text that lacks a character which every match has.
            yield char * (100 << power) + "!" + "".join(written)


def _most(quantifier: str) -> int:
    """How often a quantifier repeats; 2 stands for any number of times."""
    if quantifier in "*+":
        return 2
    if quantifier == "?":
        return 1
    numbers = [int(each) for each in re.findall(r"\d+", quantifier[:20])]
    return max([*numbers, 2 if quantifier.endswith(",}") else 0])


def _class_end(pattern: str, at: int) -> int:
    """The offset behind a class of characters, which may have classes in it."""
    depth = 1
    while at < len(pattern) and depth:
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] in "[]":
            depth += 1 if pattern[at] == "[" else -1
        at += 1
    return at
