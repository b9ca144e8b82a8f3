"""Python's literals in calls such as f(a=1, b="x"): where one ends, and the same value as JSON."""

import ast
import json
import re
from typing import Any, Final, NoReturn

_SPECIAL: Final = re.compile(r"""["'\\()\[\]{},]""")
_STRING_OR_NAME: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:True|False|None)\b')
_NAMES: Final = {"True": "true", "False": "false", "None": "null"}


class ValueEnd:
    """Finds the comma or the parenthesis after a value, a part at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._scanned = 0  # characters of the value that have been read

    def find(self, text: str, begin: int) -> int | None:
        """The position of what ends the value that begins at `begin`; None if it is not there yet."""
        at = begin + self._scanned
        while (match := _SPECIAL.search(text, at)) is not None:
            char, at = match[0], match.end()
            if char == "\\":
                if at == len(text):
                    self._scanned = match.start() - begin
                    return None
                at += 1
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                return match.start()
            else:
                self._depth += (char in "([{") - (char in ")]}")
        self._scanned = len(text) - begin
        return None


def as_json(value: str) -> str:
    """A literal of Python or JSON as JSON text. What is neither becomes a string."""
    written = _STRING_OR_NAME.sub(lambda match: _NAMES.get(match[0], match[0]), value.strip())
    try:
        json.loads(written, parse_constant=_refuse)
        return written
    except (ValueError, RecursionError):
        pass
    try:
        literal: Any = ast.literal_eval(value.strip())
        return json.dumps(literal, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(value.strip(), ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
