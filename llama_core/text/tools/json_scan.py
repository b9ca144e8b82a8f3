"""Reads JSON that arrives in parts: the head of a call, and the end of its arguments.

A function raises TooShort where the text so far is a prefix of what it reads, and Miss where no further text can complete it.
Bounds are on positions, so an answer does not depend on how the text is divided.
"""

import re
from collections.abc import Collection
from typing import Final, NamedTuple

SPACES: Final = " \t\r\n"
MAX_SPACES: Final = 64
MAX_STRING: Final = 130  # with its quotes: a tool's name has up to 128 characters
MAX_KEYS: Final = 4
ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})
_SPECIAL: Final = re.compile(r'["\\{}\[\]]')


class Miss(Exception):
    """Nothing was read: the text is something else."""


class TooShort(Miss):
    """Nothing was read: the text ends too early."""


class CallHead(NamedTuple):
    """A call begins in the text. end: where its arguments begin; `arguments`: instead of them, if the call has none."""

    end: int
    name: str
    arguments: str | None = None


def skip_spaces(text: str, at: int) -> int:
    """The position of the next character that is no white space."""
    begin = at
    while at < len(text) and text[at] in SPACES:
        at += 1
        if at - begin > MAX_SPACES:
            raise Miss
    if at == len(text):
        raise TooShort
    return at


def read_literal(text: str, at: int, *literals: str) -> tuple[str, int]:
    """The one of `literals` that begins at `at`, and the position after it."""
    for literal in literals:
        if text.startswith(literal, at):
            return literal, at + len(literal)
    raise TooShort if any(literal.startswith(text[at:]) for literal in literals) else Miss


def behind(text: str, at: int, char: str) -> int:
    """The position after `char`, with white space before it."""
    found = skip_spaces(text, at)
    if text[found] != char:
        raise Miss
    return found + 1


def read_head(text: str, at: int, names: Collection[str]) -> CallHead:
    """The beginning of {"name": ..., "arguments": {...}}, a call of one of `names`: its name comes before its arguments, an
    object. Without any, it ends at the last brace."""
    name: str | None = None
    at = behind(text, at, "{")
    for _ in range(MAX_KEYS):
        key, at = _read_string(text, skip_spaces(text, at))
        at = skip_spaces(text, behind(text, at, ":"))
        if key in ARGUMENT_KEYS:
            if name is None or text[at] != "{":
                raise Miss
            return CallHead(at, name)
        value, at = _read_string(text, at)
        if key == "name" and value in names:
            name = value
        elif key != "type" or value != "function":
            raise Miss
        at = skip_spaces(text, at)
        if text[at] == "}" and name is not None:
            return CallHead(at, name, "{}")
        at = behind(text, at, ",")
    raise Miss


def _read_string(text: str, at: int) -> tuple[str, int]:
    """A JSON string without escapes, and the position after it."""
    if text[at] != '"':
        raise Miss
    end = text.find('"', at + 1, at + MAX_STRING)
    value = text[at + 1 : end if end >= 0 else at + MAX_STRING]
    if "\\" in value or (end < 0 and len(text) >= at + MAX_STRING):
        raise Miss
    if end < 0:
        raise TooShort
    return value, end + 1


class ObjectEnd:
    """Finds the end of a JSON object, a part at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The position after the object's last brace in `text`, which continues earlier calls; None if it is not there."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = _SPECIAL.search(text, at)
            if match is None:
                return None
            at = match.end()
            self._take(match[0])
            if self._depth == 0 and not self._in_string:
                return at
        return None

    def _take(self, char: str) -> None:
        if self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
