"""Owners of one cache neither find nor displace each other's values."""

import pytest

from llama_core.grammar.shared_cache import SharedCache


def found(cache: SharedCache[str], owner: str, keys: str) -> str:
    return "".join(key for key in keys if cache.find(owner, key) is not None)


def test_an_owner_finds_its_own_values_alone() -> None:
    cache = SharedCache[str](2**20)
    assert cache.find_or_make("a", "key", lambda: "of a") == "of a"
    assert cache.find("b", "key") is None
    assert cache.find_or_make("b", "key", lambda: "of b") == "of b"
    assert cache.find_or_make("a", "key", lambda: "another") == "of a"
    cache.drop("a", "key")
    assert cache.find("a", "key") is None and cache.find("b", "key") == "of b"


def test_the_owner_who_holds_most_loses_its_least_recently_used_value() -> None:
    cache = SharedCache[str](100)
    for key in "123":
        cache.keep("a", key, key, 10)
    for key in "456789":
        cache.keep("b", key, key, 20)
        cache.find("b", "4")
    assert found(cache, "a", "123") == "123" and found(cache, "b", "456789") == "489"


def test_one_owner_has_the_whole_cache_and_loses_what_it_used_least_recently() -> None:
    cache = SharedCache[str](100)
    for key in "123456":
        cache.keep("", key, key, 25)
    assert found(cache, "", "123456") == "3456"
    cache.keep("", "3", "3", 100)  # in the place of the earlier one
    assert found(cache, "", "123456") == "3"
    cache.keep("", "7", "7", 101)
    assert found(cache, "", "37") == "7", "a value over the bound is kept alone"


def test_what_fails_is_not_kept() -> None:
    cache = SharedCache[str](2**20)

    def fail() -> str:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        cache.find_or_make("a", "key", fail)
    assert cache.find_or_make("a", "key", lambda: "made") == "made"
