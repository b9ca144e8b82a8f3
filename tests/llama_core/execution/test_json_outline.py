"""The outline of a text of JSON lacks the contents of strings that are values and spaces between them, however it arrives."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.execution.grammars.json_outline import JsonOutline

TEXTS = st.text(st.sampled_from('ab"\\{}[]:, \n\u00e9'), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def without_contents(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_contents(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_contents(each) for each in value]
    return "" if isinstance(value, str) else value


def outline_of(text: bytes, draw: Random | None = None) -> JsonOutline:
    outline = JsonOutline()
    while text:
        size = draw.randint(1, 6) if draw else len(text)
        outline.append(text[:size])
        text = text[size:]
    return outline


@given(VALUES, st.sampled_from([None, 2]), st.integers(0, 100))
def test_the_contents_of_values_are_left_out_and_those_of_keys_are_not(
    value: Any, indent: int | None, seed: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    expected = json.dumps(without_contents(value), separators=(",", ":"), ensure_ascii=False).encode()
    assert outline_of(text, Random(seed)).text == expected


@pytest.mark.parametrize(
    ("text", "outline", "in_value"),
    [
        ('{"key', '{"key', False),
        ('{"key": "val', '{"key":"', True),
        ('{"key": "val\\"', '{"key":"', True),
        ('{"key": "val"\n ', '{"key":""', False),
        ('{"a": 1, "a key', '{"a":1,"a key', False),
        ('["a", "b', '["","', True),
        ('{"a": {}, "b', '{"a":{},"b', False),
        ('"val', '"', True),
    ],
)
def test_an_outline_within_a_text(text: str, outline: str, in_value: bool) -> None:
    for draw in (None, Random(1), Random(2)):
        found = outline_of(text.encode(), draw)
        assert (found.text, found.in_value) == (outline.encode(), in_value)


def test_a_copy_goes_on_by_itself() -> None:
    first = outline_of(b'{"a":"x')
    other = first.copy()
    other.append(b'yz", "b": 1')
    assert first.text == b'{"a":"' and first.in_value and other.text == b'{"a":"","b":1'


def test_long_texts_have_no_outline() -> None:
    assert outline_of(b'["' + b"x" * 9000).text == b'["'
    outline = outline_of(b"[" + b"1," * 2100)
    outline.append(b"2]")
    assert outline.text == b""
