"""The filters and global functions of chat templates, each bounded by its inputs: those that published templates use."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any, Final

import jinja2
import markupsafe
from jinja2 import filters as builtin
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

from llama_core.text.template import ordering
from llama_core.text.template.arithmetic import check_numbers
from llama_core.text.template.budget import MAX_WEIGHT, produce, step, weigh, write
from llama_core.text.template.formatting import as_text, percent_format
from llama_core.text.template.marked_text import MarkedText, concat

MAX_INDENT: Final = 1000
MAX_RANGE: Final = 100_000
MAX_RANGE_BOUND: Final = 2**53
MAX_DATE_FORMAT: Final = 256
MAX_NUMBER_CHARS: Final = 1000
MAX_DIGITS: Final = 30  # that `round` may keep


class RefusedByTemplate(TemplateError):
    """The template called `raise_exception`."""


class TemplateNamespace(Namespace):
    """`namespace(...)`: without names that begin with an underscore, and written without its values."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no attributes that begin with an underscore")


def marked(value: object) -> MarkedText:
    """The text of a value, with its marks if it is a string that has some."""
    text = as_text(value)
    return text if isinstance(text, MarkedText) else MarkedText(text)


def metered(value: Any) -> Any:
    """What a loop iterates over: its steps are counted before, or one by one if their number is not known."""
    if isinstance(value, str):
        step(1 + len(value))
        return marked(value)
    if isinstance(value, Sized):
        step(1 + len(value))
        return value
    return value if isinstance(value, Undefined) else _counted(value)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        step()
        yield value


def read(value: Any) -> list[Any]:
    """All items of what a loop iterates over, counted."""
    items = list(islice(metered(value), MAX_WEIGHT + 1))
    weigh(items)
    return items


def percent(text: object, values: object) -> MarkedText:
    """`text % values`: the format's own characters keep their mark if all of them have it."""
    form = marked(text)
    is_own = form.own == ((0, len(form)),) and bool(form)
    pieces = percent_format(form.plain(), values)
    return concat([MarkedText.written(p.text) if is_own and p.is_literal else p.text for p in pieces])


def _bounded(function: Callable[..., Any], value_at: int = 0) -> Callable[..., Any]:
    """A filter of Jinja's that takes a sequence. A lazy sequence is read first, so that filters do not nest without bound."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for name in (*values[value_at + 1 : value_at + 2], kwargs.get("attribute")):
            ordering.check_name(name)
        given = metered(values[value_at]) if values[value_at] else values[value_at]
        values[value_at] = given if not given or isinstance(given, Sized | Undefined) else read(given)
        return function(*values, **kwargs)

    return call


def _trim(value: object, chars: str | None = None) -> str:
    return marked(value).strip(chars)


def _replace(value: object, old: str, new: str, count: int | None = None) -> str:
    return marked(value).replace(as_text(old), as_text(new), -1 if count is None else count)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items: Iterable[Any] = read(value)
    ordering.check_name(attribute)
    if attribute is not None:
        items = map(builtin.make_attrgetter(environment, attribute), items)
    return marked(d).join([as_text(item) for item in items])


def _indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > MAX_INDENT:
        raise ValueError(f"indent may be {MAX_INDENT} characters wide at most")
    margin = width if isinstance(width, str) else " " * width
    lines = (marked(value) + "\n").splitlines()
    produce(len(margin) * len(lines))
    written = [line if not line and not blank else concat((margin, line)) for line in lines[1:]]
    rest = MarkedText("\n").join([lines[0], *written]) if lines else MarkedText("")
    return concat((margin, rest)) if first else rest


def _reverse(value: Any) -> Any:
    return marked(value)[::-1] if isinstance(value, str) else reversed(read(value))


def _sum(values: Iterable[Any], start: float = 0) -> float:
    total = start
    for value in metered(values):
        check_numbers(total, value)
        total += value
    return total


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise ValueError(f"indent may be {MAX_INDENT} characters wide at most")
    if isinstance(indent, str) and len(indent) > MAX_INDENT:
        raise ValueError(f"indent may be {MAX_INDENT} characters wide at most")
    if separators is not None and not all(isinstance(each, str) and len(each) <= 8 for each in separators):
        raise ValueError("separators of JSON may have 8 characters at most")
    write(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        text = encoder.encode(value)
        produce(len(text))
        return MarkedText(text)
    return concat(_produced(encoder.iterencode(value)))


def _produced(pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        produce(len(piece))
        yield piece


def _escape(value: object) -> str:
    produce(6 * len(marked(value)))
    return MarkedText(str.__str__(markupsafe.escape(marked(value).plain())))


def _title(value: object) -> str:
    text = marked(value).plain()
    produce(3 * len(text))
    step(len(text))
    return MarkedText(builtin.do_title(text))


def _int(value: Any, default: Any = 0, base: int = 10) -> Any:
    if isinstance(value, str) and len(value) > MAX_NUMBER_CHARS:
        return default
    return builtin.do_int(value, default, base)


def _float(value: Any, default: Any = 0.0) -> Any:
    return default if isinstance(value, str) and len(value) > MAX_NUMBER_CHARS else builtin.do_float(value, default)


def _round(value: Any, precision: int = 0, method: Any = "common") -> float:
    check_numbers(value)
    if abs(precision) > MAX_DIGITS:
        raise ValueError(f"round keeps {MAX_DIGITS} digits at most")
    return builtin.do_round(value, precision, method)


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": abs,
    "capitalize": lambda value: marked(value).capitalize(),
    "count": len,
    "d": builtin.do_default,
    "default": builtin.do_default,
    "dictsort": ordering.sorted_items,
    "e": _escape,
    "escape": _escape,
    "first": _bounded(builtin.do_first, 1),
    "float": _float,
    "format": lambda value, *values: percent(value, values),
    "indent": _indent,
    "int": _int,
    "items": builtin.do_items,
    "join": _join,
    "last": _bounded(builtin.do_last, 1),
    "length": len,
    "list": read,
    "lower": lambda value: marked(value).lower(),
    "map": _bounded(builtin.sync_do_map, 1),
    "max": _bounded(ordering.largest, 1),
    "min": _bounded(ordering.smallest, 1),
    "reject": _bounded(builtin.sync_do_reject, 1),
    "rejectattr": _bounded(builtin.sync_do_rejectattr, 1),
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": marked,
    "select": _bounded(builtin.sync_do_select, 1),
    "selectattr": _bounded(builtin.sync_do_selectattr, 1),
    "sort": _bounded(ordering.in_order, 1),
    "string": marked,
    "sum": _sum,
    "title": _title,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _bounded(ordering.unique, 1),
    "upper": lambda value: marked(value).upper(),
}


def _range(*bounds: int) -> range:
    if any(abs(bound) > MAX_RANGE_BOUND for bound in bounds):
        raise ValueError("the bounds of a range are too large")
    values = range(*bounds)
    if len(values) > MAX_RANGE:
        raise ValueError(f"range may have {MAX_RANGE} items at most")
    return values


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    weigh(made)
    return made


def _raise_exception(message: object) -> None:
    raise RefusedByTemplate(str.__str__(marked(message)))


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise ValueError("the format of a date is too long")
    return MarkedText(datetime.now().strftime(str.__str__(form)))


GLOBALS: Final[Mapping[str, Callable[..., Any]]] = {
    "dict": _dict,
    "namespace": TemplateNamespace,
    "raise_exception": _raise_exception,
    "range": _range,
    "strftime_now": _strftime_now,
}
