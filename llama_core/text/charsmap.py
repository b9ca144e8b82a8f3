"""Whether SentencePiece's compiled normalization table, in a tokenizer.json, is sound: the `tokenizers` library does not check.

A table has the size of its trie in bytes, the trie (a double array of 32-bit units, as in Darts), and the replacements: texts
that end with NUL. A leaf has the offset of its replacement.
"""

import base64
import binascii
from array import array
from collections.abc import Sequence
from typing import Final

_MAX_TEXT_BYTES: Final = 200  # NFKC's longest replacement has 33
_LEAF: Final = 1 << 31


def check_charsmap(encoded: object) -> None:
    """Raises ValueError that names the field."""
    if encoded is None or encoded == "":
        return
    try:
        table = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        table = b""
    num_bytes = int.from_bytes(table[:4], "little")
    if len(table) < 8 or num_bytes % 4 or not 4 <= num_bytes <= len(table) - 4:
        raise _error("is no table of characters in base64")
    units = array("I", table[4 : 4 + num_bytes])
    texts = table[4 + num_bytes :]
    begins = _text_starts(texts)
    for unit in _leaves(units):
        if unit not in begins:
            raise _error("has a character without a replacement")


def _text_starts(texts: bytes) -> frozenset[int]:
    """The offsets at which a leaf's text may begin: any character's."""
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise _error("has replacements that are no UTF-8") from None
    if texts[-1:] not in (b"", b"\0") or any(len(text) > _MAX_TEXT_BYTES for text in texts.split(b"\0")):
        raise _error(f"has a replacement of more than {_MAX_TEXT_BYTES} bytes, or without an end")
    return frozenset(at for at, byte in enumerate(texts) if byte & 0xC0 != 0x80)


def _leaves(units: Sequence[int]) -> list[int]:
    """The values of all leaves that a text can reach. Each unit is visited once."""
    found: list[int] = []
    seen = {0}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        base = at ^ _offset(units[at])
        if base | 0xFF >= len(units):
            raise _error("has a trie with a branch beyond its end")
        if units[at] >> 8 & 1:  # a text ends here
            found.append(units[base] & (_LEAF - 1))
        for byte in range(1, 256):
            child = base ^ byte
            if units[child] & (_LEAF | 0xFF) == byte and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def _offset(unit: int) -> int:
    return unit >> 10 << (8 if unit >> 9 & 1 else 0)


def _error(problem: str) -> ValueError:
    return ValueError(f"normalizer: precompiled_charsmap {problem}")
