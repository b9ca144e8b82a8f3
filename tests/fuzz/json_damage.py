"""Damaged bytes, and JSON with other values."""

import json
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any


def damaged(content: bytes, draw: Random, begin: int = 0, end: int | None = None) -> bytes:
    """`content` with bits flipped, or bytes removed, repeated or random, between `begin` and `end`."""
    data, end = bytearray(content), len(content) if end is None else end
    for _ in range(draw.choice((1, 1, 2, 5))):
        if not data:
            break
        at = draw.randrange(begin, max(begin + 1, min(end, len(data))))
        how = draw.random()
        if how < 0.6:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how < 0.7:
            data[at % len(data)] = draw.choice((0, 0xFF, 0x7F, 0x80))
        elif how < 0.8:
            data[at : at + draw.randint(1, 64)] = draw.randbytes(draw.randint(0, 64))
        elif how < 0.9:
            data[at:at] = data[at : at + draw.randint(1, 500)]
        elif len(data) > at > 0:
            del data[at:]
    return bytes(data)


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 100_000, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, -(10**400), 0.0, -0.0,
    0.5, 1e-320, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"), "", "256", "a", " ", "\0", "<s>", "Ġ", "▁",
    "x" * 5000, "\ud800", "../x.safetensors", "/etc/passwd", "F16", [], [256], [["a", "b"]], [0, 0], {}, {"dim": 256},
    {"type": "Unknown"},
)  # fmt: skip
_NO_OBJECTS = (
    b"", b"[]", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"\xff\xfe{}", b'{"dim": NaN}',
    b"\xef\xbb\xbf{}", b"\0" * 100, b'"' + b"x" * 10**6 + b'"',
)  # fmt: skip


def damage_json(content: bytes, draw: Random, more: Sequence[str] = (), values: Sequence[Any] = VALUES) -> bytes:
    """Other bytes, or an object with other values anywhere and in the fields `more`."""
    how = draw.random()
    if how < 0.25:
        return damaged(content, draw)
    if how < 0.35:
        return draw.choice((*_NO_OBJECTS, content + b"x", b"{" + content))
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if more and draw.random() < 0.5:
            value[draw.choice(more)] = draw.choice((*values, draw.randint(-5, 600)))
        else:
            _change_any(value, draw, values)
    text = json.dumps(value)
    if draw.random() < 0.05:  # a field twice: the last one counts in Python, and is refused elsewhere
        text = text[:-1] + f", {json.dumps(draw.choice(list(value) or ['a']))}: {json.dumps(draw.choice(values))}}}"
    return text.encode()


def _change_any(value: Any, draw: Random, values: Sequence[Any]) -> None:
    """A field or an element anywhere is removed, replaced or repeated."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(value[key], dict | list) or draw.random() < 0.25:
            break
        value = value[key]
    how = draw.random()
    if how < 0.2:
        del value[key]
    elif how < 0.8 or not isinstance(value, list):
        value[key] = deepcopy(draw.choice((*values, draw.randint(-5, 600))))  # which later changes must not reach
    else:
        value.append(value[key])
