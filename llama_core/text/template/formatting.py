"""The two string formatting operators of Python, for templates: no attributes, no items, no wide fields."""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from llama_core.text.template.budget import produce, step, write

MAX_FIELD_WIDTH: Final = 1000
MAX_NAME: Final = 256
# Every repetition has a bound: a search from each "%" would be quadratic else.
_PERCENT: Final = re.compile(
    r"%(?:%|(?:\((?P<name>\w{1,256})\))?(?P<spec>[-+ #0]{0,8}\d{0,8}(?:\.\d{1,8})?[sdifFeEgGxXo]))"
)


class Piece(NamedTuple):
    """A part of a formatted text. is_literal: a copy of the format's own characters."""

    text: str
    is_literal: bool


def percent_format(text: str, values: object) -> Iterator[Piece]:
    """`text % values`. Raises TypeError or ValueError for what it does not support."""
    named = values if isinstance(values, Mapping) else None
    rest = iter(values if isinstance(values, tuple) else (values,))
    at = 0
    for match in _PERCENT.finditer(text):
        step()
        yield Piece(_without_percent(text[at : match.start()]), True)
        at = match.end()
        if match[0] == "%%":
            yield Piece("%", True)
            continue
        try:
            value = next(rest) if match["name"] is None else (named or {})[match["name"]]
        except StopIteration:
            raise TypeError("not enough arguments for format string") from None
        yield Piece(_converted(value, match["spec"]), False)
    yield Piece(_without_percent(text[at:]), True)
    if named is None and any(True for _ in rest):
        raise TypeError("not all arguments converted during string formatting")


def braces_format(text: str, values: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Piece]:
    """`text.format(*values, **named)` with fields by number and name. Raises TypeError, ValueError or LookupError."""
    number = 0
    for literal, field, spec, conversion in string.Formatter().parse(text):
        step()
        yield Piece(literal, True)
        if field is None:
            continue
        if conversion or "{" in (spec or "") or len(field) > MAX_NAME or not re.fullmatch(r"\w*", field):
            raise ValueError("this format field is not supported in a chat template")
        if field == "":
            field, number = str(number), number + 1
        value = values[int(field)] if field.isdecimal() else named[field]
        yield Piece(_filled(value, spec or ""), False)


def as_text(value: object) -> str:
    """`str(value)`; a string as it is, with its marks."""
    if isinstance(value, str):
        return value
    write(value)
    text = str(value)
    produce(len(text))
    return text


def _converted(value: object, spec: str) -> str:
    """A value by a conversion of `%`: %s takes all, the others take numbers."""
    if spec == "s":
        return as_text(value)
    _check_width(spec)
    given = as_text(value) if spec.endswith("s") else value
    produce(MAX_FIELD_WIDTH + (len(given) if isinstance(given, str) else 0))
    return ("%" + spec) % (given,)


def _filled(value: object, spec: str) -> str:
    _check_width(spec)
    given = as_text(value) if isinstance(value, str) or not spec else value
    produce(MAX_FIELD_WIDTH + (len(given) if isinstance(given, str) else 0) if spec else 0)
    return format(given, spec)


def _without_percent(text: str) -> str:
    if "%" in text:
        raise ValueError("this conversion is not supported in a chat template")
    return text


def _check_width(spec: str) -> None:
    if any(len(number) > 4 or int(number) > MAX_FIELD_WIDTH for number in re.findall(r"\d+", spec)):
        raise ValueError(f"a field may be {MAX_FIELD_WIDTH} characters wide at most")
