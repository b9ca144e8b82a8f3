"""The arithmetic of chat templates: numbers of bounded size, and texts and lists that are counted before they are made."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from jinja2.runtime import Undefined

from llama_core.text.template import budget
from llama_core.text.template.marked_text import MarkedText, concat

MAX_INT_BITS: Final = 4096


def check_numbers(*values: object) -> None:
    """Raises TypeError for what is no number, OverflowError for one that is too large. Undefined explains itself."""
    for value in values:
        if not isinstance(value, int | float | Undefined):
            raise TypeError("this operator takes numbers")
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise OverflowError("a number is too large")


def _numeric(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def call(left: Any, right: Any) -> Any:
        check_numbers(left, right)
        return function(left, right)

    return call


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        return concat((left, right))
    if isinstance(left, int | float):
        check_numbers(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.step(len(left) + len(right))
    result = left + right
    budget.weigh(result)
    return result


def _multiply(left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            budget.produce(len(value) * max(count, 0))
            if isinstance(value, str):
                return (value if isinstance(value, MarkedText) else MarkedText(value)) * count
            budget.step(len(value) * max(count, 0))
            result = value * count
            budget.weigh(result)
            return result
    check_numbers(left, right)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INT_BITS:
        raise OverflowError("a number is too large")
    return left * right


def _power(left: Any, right: Any) -> Any:
    check_numbers(left, right)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
        raise OverflowError("a number is too large")
    return left**right


remainder: Final = _numeric(operator.mod)
OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": _add,
    "-": _numeric(operator.sub),
    "*": _multiply,
    "/": _numeric(operator.truediv),
    "//": _numeric(operator.floordiv),
    "%": remainder,
    "**": _power,
}
