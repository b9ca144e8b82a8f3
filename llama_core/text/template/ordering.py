"""The filters that compare items with each other. Their keys are counted together, before any is compared."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import jinja2
from jinja2 import filters as builtin

from llama_core.text.template.budget import step, walk

MAX_NAME: Final = 256  # of an attribute, or several with commas
_Attribute = str | int | None


def check_name(name: object) -> None:
    """Raises ValueError for a name of an attribute, filter or test that is too long to be split."""
    if isinstance(name, str) and len(name) > MAX_NAME:
        raise ValueError(f"the name of an attribute, filter or test has {MAX_NAME} characters at most")


@jinja2.pass_environment
def in_order(
    environment: jinja2.Environment,
    values: Iterable[Any],
    reverse: bool = False,
    case_sensitive: bool = False,
    attribute: _Attribute = None,
) -> list[Any]:
    check_name(attribute)
    items = list(values)
    getter = builtin.make_multi_attrgetter(environment, attribute, None if case_sensitive else builtin.ignore_case)
    return _ordered(items, [getter(item) for item in items], reverse)


def sorted_items(
    value: Mapping[Any, Any],
    case_sensitive: bool = False,
    by: Literal["key", "value"] = "key",
    reverse: bool = False,
) -> list[tuple[Any, Any]]:
    """The filter `dictsort`."""
    if by not in ("key", "value"):
        raise jinja2.exceptions.FilterArgumentError("dictsort sorts by key or by value")
    pairs = list(value.items())
    keys = [pair[by == "value"] for pair in pairs]
    return _ordered(pairs, keys if case_sensitive else list(map(builtin.ignore_case, keys)), reverse)


def _ordered(items: list[Any], keys: list[Any], reverse: bool) -> list[Any]:
    walk(keys)
    step(len(keys))
    return [items[at] for at in sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)]


@jinja2.pass_environment
def smallest(
    environment: jinja2.Environment,
    values: Iterable[Any],
    case_sensitive: bool = False,
    attribute: _Attribute = None,
) -> Any:
    items = list(values)
    keys = _keys(environment, items, case_sensitive, attribute)
    return items[min(range(len(items)), key=keys.__getitem__)] if items else environment.undefined("no items")


@jinja2.pass_environment
def largest(
    environment: jinja2.Environment,
    values: Iterable[Any],
    case_sensitive: bool = False,
    attribute: _Attribute = None,
) -> Any:
    items = list(values)
    keys = _keys(environment, items, case_sensitive, attribute)
    return items[max(range(len(items)), key=keys.__getitem__)] if items else environment.undefined("no items")


@jinja2.pass_environment
def unique(
    environment: jinja2.Environment,
    values: Iterable[Any],
    case_sensitive: bool = False,
    attribute: _Attribute = None,
) -> Iterator[Any]:
    items = list(values)
    seen: set[Any] = set()
    for item, key in zip(items, _keys(environment, items, case_sensitive, attribute), strict=True):
        step(1 + len(seen) // 64)  # all keys may have one hash
        if key not in seen:
            seen.add(key)
            yield item


def _keys(environment: jinja2.Environment, items: list[Any], case_sensitive: bool, attribute: _Attribute) -> list[Any]:
    check_name(attribute)
    postprocess = None if case_sensitive else builtin.ignore_case
    keys = list(map(builtin.make_attrgetter(environment, attribute, postprocess), items))
    walk(keys)
    return keys
