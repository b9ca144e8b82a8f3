"""Reads JSON that arrives in parts: the head of a call, and the end of its arguments.

Every function says MORE where the text so far is a prefix of what it reads, and NO where no further text can complete it.
Bounds are on positions, so an answer does not depend on how the text is divided.
"""

import re
from collections.abc import Collection
from enum import Enum
from typing import Final, NamedTuple

SPACES: Final = " \t\r\n"
MAX_SPACES: Final = 64
MAX_STRING: Final = 130  # with its quotes: a tool's name has up to 128 characters
MAX_KEYS: Final = 4
ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})
_SPECIAL: Final = re.compile(r'["\\{}\[\]]')


class Miss(Enum):
    """Why nothing was read."""

    MORE = "the text ends too early"
    NO = "the text is something else"


MORE: Final = Miss.MORE
NO: Final = Miss.NO


class Head(NamedTuple):
    """The beginning of {"name": ..., "arguments": {...}}. end: where the arguments or, without any, the last brace begins."""

    end: int
    name: str
    has_arguments: bool


def skip_spaces(text: str, at: int) -> int | Miss:
    """The position of the next character that is no white space."""
    begin = at
    while at < len(text) and text[at] in SPACES:
        at += 1
        if at - begin > MAX_SPACES:
            return NO
    return at if at < len(text) else MORE


def read_literal(text: str, at: int, literal: str) -> int | Miss:
    """The position after `literal`, which must begin at `at`."""
    if text.startswith(literal, at):
        return at + len(literal)
    return MORE if literal.startswith(text[at:]) else NO


def read_string(text: str, at: int) -> tuple[str, int] | Miss:
    """A JSON string without escapes, and the position after it."""
    if text[at] != '"':
        return NO
    end = text.find('"', at + 1, at + MAX_STRING)
    value = text[at + 1 : end if end >= 0 else at + MAX_STRING]
    if "\\" in value or (end < 0 and len(text) >= at + MAX_STRING):
        return NO
    return (value, end + 1) if end >= 0 else MORE


def read_head(text: str, at: int, names: Collection[str]) -> Head | Miss:
    """The head of a call of one of `names`: its name comes before its arguments, an object."""
    opened = _behind(text, at, "{")
    if isinstance(opened, Miss):
        return opened
    name: str | None = None
    at = opened
    for _ in range(MAX_KEYS):
        key = _key(text, at)
        if isinstance(key, Miss):
            return key
        found = skip_spaces(text, key[1])
        if isinstance(found, Miss):
            return found
        if key[0] in ARGUMENT_KEYS:
            return Head(found, name, True) if name is not None and text[found] == "{" else NO
        value = read_string(text, found)
        if isinstance(value, Miss):
            return value
        if key[0] == "name":
            name = value[0]
            if name not in names:
                return NO
        elif key[0] != "type" or value[0] != "function":
            return NO
        end = skip_spaces(text, value[1])
        if isinstance(end, Miss):
            return end
        if text[end] == "}" and name is not None:
            return Head(end, name, False)
        if text[end] != ",":
            return NO
        at = end + 1
    return NO


def _behind(text: str, at: int, char: str) -> int | Miss:
    """The position after `char`, with white space before it."""
    found = skip_spaces(text, at)
    return found if isinstance(found, Miss) else found + 1 if text[found] == char else NO


def _key(text: str, at: int) -> tuple[str, int] | Miss:
    """A key, and the position after its colon."""
    found = skip_spaces(text, at)
    if isinstance(found, Miss):
        return found
    key = read_string(text, found)
    if isinstance(key, Miss):
        return key
    colon = _behind(text, key[1], ":")
    return colon if isinstance(colon, Miss) else (key[0], colon)


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
