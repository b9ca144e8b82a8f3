"""Comparisons and tests of chat templates: what they read as a whole is counted first."""

from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from jinja2.runtime import LoopContext, Undefined

from llama_core.text.template.arithmetic import remainder
from llama_core.text.template.budget import step, walk
from llama_core.text.template.filters import read
from llama_core.text.template.formatting import as_text


def compared(value: Any) -> Any:
    """An operand of a comparison."""
    walk(value)
    return value


def container(value: Any) -> Any:
    """The right operand of `in`. A lazy sequence is read first, so that all of it is counted."""
    if not isinstance(value, Undefined) and (isinstance(value, LoopContext) or not isinstance(value, Sized)):
        value = read(value)
    if isinstance(value, Sized) and not isinstance(value, str):
        step(1 + len(value) // 16)
    walk(value)
    return value


def _divisible(value: Any, by: Any) -> bool:
    return bool(remainder(value, by) == 0)


# In place of Jinja2's, which format a text with `%`, or write a list.
TESTS: Final[Mapping[str, Callable[..., bool]]] = {
    "in": lambda value, values: value in container(values),
    "odd": lambda value: not _divisible(value, 2),
    "even": lambda value: _divisible(value, 2),
    "divisibleby": _divisible,
    "lower": lambda value: as_text(value).islower(),
    "upper": lambda value: as_text(value).isupper(),
}
