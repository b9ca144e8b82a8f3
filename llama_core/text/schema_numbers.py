"""Numbers of limited length: regular expressions, and JSON schemas that bound integers.

A number of JSON has any number of digits, and a small model may write digits until `max_tokens`. RFC 8259, section 6, has
implementations limit range and precision, and expects no more than doubles. The limits here keep 64-bit integers but for the
last thousand, and every double as Python and JavaScript write it.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

MAX_INTEGER: Final = 2**63 - 1024  # the largest double below 2^63: llguidance holds limits as doubles
WHOLE_DIGITS: Final = 21  # JavaScript writes 123456789012345680000 without an exponent
FRACTION_DIGITS: Final = 22  # JavaScript writes 0.0000012345678901234567 so too
_TIME_CHARS: Final = {"time": len("23:59:59.123456789+00:00"), "date-time": len("2026-01-01T23:59:59.123456789+00:00")}

# Keywords whose values are schemas by name, or are no schemas.
SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
PLAIN_VALUES: Final = frozenset({"const", "enum", "required", "default", "examples", "x-guidance"})

_DECIMAL: Final = rf"(0|[1-9][0-9]{{0,{WHOLE_DIGITS - 1}}})(\.[0-9]{{1,{FRACTION_DIGITS}}})?"
NUMBER: Final = rf"-?{_DECIMAL}([eE][+-]?[0-9]{{1,3}})?"

# With more digits it might be an integer as a double.
_NO_INTEGER: Final = r"-?[0-9]{1,9}\.[0-9]{0,5}[1-9]"


def has_large_number(value: Any) -> bool:
    """Whether a number of the schema, such as a limit or a constant, is beyond those that the bounds allow."""
    if isinstance(value, dict):
        return any(map(has_large_number, value.values()))
    if isinstance(value, list):
        return any(map(has_large_number, value))
    return isinstance(value, int | float) and not abs(value) < MAX_INTEGER


def bounded_schema(schema: Any) -> Any:
    """The schema with limits for its integers, and with at most 9 digits for fractions of seconds. A schema with larger numbers
    of its own stays as it is."""
    try:
        return schema if has_large_number(schema) else _bounded(schema)
    except RecursionError:  # deeper than llguidance takes
        return schema


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: _bounded_value(key, value) for key, value in schema.items()}
    types = schema.get("type")
    if "const" in schema or "enum" in schema:
        return bounded
    if types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types):
        if "minimum" not in schema and "exclusiveMinimum" not in schema:
            bounded["minimum"] = -MAX_INTEGER
        if "maximum" not in schema and "exclusiveMaximum" not in schema:
            bounded["maximum"] = MAX_INTEGER
    if types == "string" and "maxLength" not in schema and str(schema.get("format")) in _TIME_CHARS:
        bounded["maxLength"] = _TIME_CHARS[schema["format"]]
    return bounded


def _bounded_value(key: str, value: Any) -> Any:
    if key in SCHEMA_MAPS and isinstance(value, dict):
        return {name: _bounded(item) for name, item in value.items()}
    return value if key in PLAIN_VALUES else _bounded(value)


def number_terminal(schema: Mapping[str, Any], *, is_integer: bool = True) -> str | None:
    """The body of a terminal of Lark for numbers between the schema's limits; None where it has others, such as `multipleOf`.

    As llguidance writes them, numbers with a limit have no exponent. is_integer: whether they may be integers; else they have
    at most 9 digits before the point and 6 behind it.
    """
    if not is_integer:
        body = number_terminal(schema)
        return None if body is None else f"({body}) & /{_NO_INTEGER}/"
    limits = {
        key: schema[key] for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if key in schema
    }
    if "multipleOf" in schema or not all(map(_is_limit, limits.values())):
        return None
    if not limits:
        return f"/{NUMBER}/"
    low = _limit(limits, "minimum", "exclusiveMinimum", max)
    high = _limit(limits, "maximum", "exclusiveMaximum", min)
    if low is not None and high is not None and low[0] >= high[0]:
        return None
    parts = []
    if high is None or high[0] > 0 or (high[0] == 0 and not high[1]):
        parts.append(_between(None if low is None or low[0] < 0 else low, high))
    if low is None or low[0] < 0:
        parts.append(f'"-" {_between(_negated(high), _negated(low))}')
    return " | ".join(parts)


_Limit = tuple[Decimal, bool]  # and whether it is excluded


def _is_limit(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return all(len(digits) <= FRACTION_DIGITS for digits in _digits(Decimal(repr(value))))


def _limit(limits: Mapping[str, float], closed: str, opened: str, tighter: Any) -> _Limit | None:
    found = [(Decimal(repr(limits[key])), key == opened) for key in (closed, opened) if key in limits]
    if len({value for value, _ in found}) == 1:
        return found[-1]  # the open one
    return tighter(found) if found else None


def _negated(limit: _Limit | None) -> _Limit | None:
    """The limit of the number behind a minus sign. None where it is no limit: every such number is below 0."""
    if limit is None or limit[0] > 0:
        return None
    return -limit[0], limit[1]


def _between(low: _Limit | None, high: _Limit | None) -> str:
    """A group of a terminal: decimals without a sign between the limits."""
    parts = [_DECIMAL]
    if low is not None and (low[0] > 0 or low[1]):
        parts.append(_at_least(*low))
    if high is not None:
        parts.append(_at_most(*high))
    return "(" + " & ".join(f"/{part}/" for part in parts) + ")"


_FRACTION: Final = r"(\.[0-9]+)?"


def _at_least(limit: Decimal, is_excluded: bool) -> str:
    """Decimals from `limit`, which is not negative, as a regular expression. Integral parts have no leading zeros."""
    whole, fraction = _digits(limit)
    found = [rf"[1-9][0-9]{{{len(whole)},}}{_FRACTION}"]
    found += [
        f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{len(whole) - i - 1}}}{_FRACTION}"
        for i, digit in enumerate(whole)
        if digit < "9"
    ]
    found += [rf"{whole}\.{fraction[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(fraction) if digit < "9"]
    more = "[0-9]*[1-9][0-9]*" if is_excluded else "[0-9]*"
    if fraction or is_excluded:
        found.append(rf"{whole}\.{fraction}{more}")
    else:
        found.append(f"{whole}{_FRACTION}")
    return "|".join(found)


def _at_most(limit: Decimal, is_excluded: bool) -> str:
    """A regular expression of the decimals up to `limit`, which is not negative."""
    whole, fraction = _digits(limit)
    found = []
    if len(whole) > 1:
        found.append(rf"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){_FRACTION}")
    for i, digit in enumerate(whole):
        lowest = 1 if i == 0 and len(whole) > 1 else 0
        if int(digit) > lowest:
            found.append(f"{whole[:i]}[{lowest}-{int(digit) - 1}][0-9]{{{len(whole) - i - 1}}}{_FRACTION}")
    if fraction:
        found.append(whole)
        found += [rf"{whole}\.{fraction[:i]}" for i in range(1, len(fraction))]
        found += [
            rf"{whole}\.{fraction[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(fraction) if digit > "0"
        ]
    if not is_excluded:
        found.append(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")
    return "|".join(found)


def _digits(limit: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{abs(limit):f}".partition(".")
    return whole, fraction.rstrip("0")
