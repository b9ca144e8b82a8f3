"""GPT-2's map between bytes and the characters that byte-level BPE vocabularies write them as."""

from collections.abc import Mapping, Set
from typing import Final


def _byte_chars() -> dict[int, str]:
    """Printable bytes of Latin-1 are themselves; the others are the characters from U+0100 on, in their order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


CHAR_OF_BYTE: Final[Mapping[int, str]] = _byte_chars()
BYTE_OF_CHAR: Final[Mapping[str, int]] = {char: byte for byte, char in CHAR_OF_BYTE.items()}
_PRINTABLE_ASCII: Final = range(0x20, 0x7F)
_UTF8_BYTES: Final = [*range(0xC0), *range(0xC2, 0xF5)]  # that occur in UTF-8


def has_every_byte(tokens: Set[str]) -> bool:
    """Whether a vocabulary has a token for each byte of UTF-8. BPE leaves a byte without a token out of the ids.

    Vocabularies of real models lack a few that were not in their training text. Raises ValueError for one without a printable
    character of ASCII, which is damaged.
    """
    if missing := [byte for byte in _PRINTABLE_ASCII if CHAR_OF_BYTE[byte] not in tokens]:
        raise ValueError(f"has no token for the byte {missing[0]}")
    return all(CHAR_OF_BYTE[byte] in tokens for byte in _UTF8_BYTES)


def bytes_of(token: str) -> bytes | None:
    """The bytes that a vocabulary writes as `token`, or None if it has a character that stands for no byte."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return None
