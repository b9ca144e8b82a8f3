"""A vocabulary's tokens by what they do to a text of JSON, and masks over a vocabulary: uint32 words of one bit a token."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_IN_NUMBERS: Final = frozenset(b"0123456789+-.eE")
_CLOSERS: Final = b"}])"  # the last one of pythonic calls
_VALUES: Final = b"0123456789tfnTFN"  # the first characters of short values, as JSON and pythonic calls write them
_BETWEEN_CALLS: Final = b";<"  # what formats of tools write before another call
SPACES: Final = b" \n\r\t"
_EMPTY_VALUES: Final = (b'""', b"[]", b"{}")
_AT_ONCE: Final = 8192  # characters
_FEW: Final = 8  # tokens that take less time one by one than as an array


@dataclass(slots=True)
class JsonText:
    """Where a text of JSON stands: inside a string, behind a backslash in one, or in a number (or a word of such letters)."""

    in_string: bool = False
    is_escaped: bool = False
    in_number: bool = False

    def copy(self) -> "JsonText":
        return JsonText(self.in_string, self.is_escaped, self.in_number)

    def append(self, text: bytes) -> None:
        for char in text:
            if not self.in_string:
                self.in_string = char == _QUOTE
                self.in_number = char in _IN_NUMBERS
            elif self.is_escaped:
                self.is_escaped = False
            else:
                self.is_escaped = char == _BACKSLASH
                self.in_string = char != _QUOTE


class JsonVocabulary:
    """A vocabulary's tokens by what they do to a text of JSON, as masks: uint32 words of one bit a token."""

    def __init__(self, vocabulary: "LLTokenizer", num_words: int) -> None:
        self._vocabulary = vocabulary
        self.num_words = num_words

    def prepare(self) -> None:
        """Make all masks, which takes seconds for 128,000 tokens."""
        assert self.between and self.closing_string and self.in_text and self.characters
        for array in (self.character_bits, self.end_bits, self.in_numbers, self.spaces, self.beginning_character):
            assert array.size
        for array in (self.lengths, self.openings, self.texts_behind_string, self.leaving_string):
            assert array.size

    def text(self, token: int) -> bytes:
        return self._texts[token] if token < len(self._texts) else b""

    def num_tokens(self, text: str, most: int) -> int:
        """Tokens of the text, counted up to `most`. In parts, because llguidance holds Python's lock meanwhile: 0.1 s for 126
        kB."""
        num_tokens = 0
        for begin in range(0, len(text), _AT_ONCE):
            num_tokens += len(self._vocabulary.tokenize_str(text[begin : begin + _AT_ONCE]))
            if num_tokens >= most:
                return most
        return num_tokens

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self._vocabulary.eos_tokens)

    @cached_property
    def end_bits(self) -> np.ndarray:
        return bits_of(self.ends, self.num_words)

    @cached_property
    def between(self) -> list[np.ndarray]:
        """Outside a string, by the first character behind spaces: from what closes most to what opens most."""
        closes = self._mask(lambda text: not text.strip(_CLOSERS + SPACES) and bool(text.strip(SPACES)))
        short, long = ((b",", b":", _VALUES, b"-"), (b'"', b"[", b"{", _BETWEEN_CALLS))
        first_is_one_of = [self._mask(partial(_begins, chars=chars)) for chars in (*short, *long)]
        # Before the tokens that only open a value, those that close it too.
        first_is_one_of.insert(len(short), self._mask(_is_empty_value))
        return [self.end_bits, closes, *first_is_one_of]

    @cached_property
    def closing_string(self) -> list[np.ndarray]:
        """Inside a string: what ends it and closes more, then all else that begins with its end."""
        closes = self._mask(lambda text: text[0] == _QUOTE and not text[1:].strip(_CLOSERS))
        return [closes, self._mask(lambda text: text[0] == _QUOTE)]

    @cached_property
    def leaving_string(self) -> np.ndarray:
        """Inside a string: all tokens that end it."""
        return bits_of(np.flatnonzero(self.texts_behind_string), self.num_words)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [tokens]: bytes of each text."""
        return np.fromiter(map(len, self._texts), np.int32)

    @cached_property
    def openings(self) -> np.ndarray:
        """int32 [tokens]: a number for the first two characters behind spaces; 0 for a text without."""
        return np.fromiter((_number_of(text) if text.strip(SPACES) else 0 for text in self._texts), np.int32)

    @cached_property
    def texts_behind_string(self) -> np.ndarray:
        """int32 [tokens]: inside a string, a number for the text behind its end; 0 for a token that does not end it."""
        numbers: dict[bytes | None, int] = {None: 0}
        behind = ((None if found is None else found.lstrip(SPACES)) for found in map(_behind, self._texts))
        return np.fromiter((numbers.setdefault(text, len(numbers)) for text in behind), np.int32)

    @cached_property
    def in_numbers(self) -> np.ndarray:
        return self._mask(lambda text: _IN_NUMBERS.issuperset(text))

    @cached_property
    def spaces(self) -> np.ndarray:
        return self._mask(lambda text: not text.strip(SPACES))

    @cached_property
    def in_text(self) -> list[np.ndarray]:
        """Masks of a line break and of two letters. Free text allows all three; JSON allows no line break within a string, and
        hardly any letters outside."""
        return [self._mask(text.__eq__) for text in (b"\n", b"q", b"z")]

    @cached_property
    def beginning_character(self) -> np.ndarray:
        """All tokens but those that go on within a character of several bytes."""
        return bits_of(
            (i for i, text in enumerate(self._texts) if not 0x80 <= text[:1].ljust(1)[0] < 0xC0), self.num_words
        )

    @cached_property
    def characters(self) -> dict[bytes, int]:
        """A token for each character of ASCII that has one of its own."""
        return {text: i for i, text in enumerate(self._texts) if len(text) == 1 and 0x20 <= text[0] < 0x7F}

    @cached_property
    def character_bits(self) -> np.ndarray:
        return bits_of(self.characters.values(), self.num_words)

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self._vocabulary.decode_bytes([token]) for token in range(self._vocabulary.vocab_size)]

    def _mask(self, belongs: Callable[[bytes], bool]) -> np.ndarray:
        return bits_of((i for i, text in enumerate(self._texts) if text and belongs(text)), self.num_words)


def _begins(text: bytes, chars: bytes) -> bool:
    first = text.lstrip(SPACES)[:1]
    return bool(first) and first in chars


def _is_empty_value(text: bytes) -> bool:
    """Whether the text is an empty value, and maybe closes what is open behind it."""
    value = text.strip(SPACES)
    return value[:2] in _EMPTY_VALUES and not value[2:].strip(_CLOSERS + SPACES)


def _number_of(text: bytes) -> int:
    return 1 + int.from_bytes(text.lstrip(SPACES)[:2].ljust(2, b"\0"), "big")


def _behind(text: bytes) -> bytes | None:
    """The part of a token's text behind the end of the string in which it begins; None where it does not end the string."""
    if b'"' not in text:
        return None
    place = JsonText(in_string=True)
    for i in range(len(text)):
        place.append(text[i : i + 1])
        if not place.in_string:
            return text[i + 1 :]
    return None


def first_of(bits: np.ndarray) -> int:
    """The lowest token of a mask, which must not be empty."""
    word = int(np.flatnonzero(bits)[0])
    value = int(bits[word])
    return 32 * word + (value & -value).bit_length() - 1


def tokens_of(bits: np.ndarray) -> list[int]:
    """The tokens of a mask in ascending order."""
    words = np.flatnonzero(bits)  # few of thousands, mostly
    rows, columns = np.nonzero(np.unpackbits(bits[words].view(np.uint8), bitorder="little").reshape(-1, 32))
    found: list[int] = (32 * words[rows] + columns).tolist()
    return found


def each_of(bits: np.ndarray) -> Iterator[int]:
    """The tokens one by one, for a reader that stops after some."""
    for word in np.flatnonzero(bits).tolist():
        value = int(bits[word])
        while value:
            yield 32 * word + (value & -value).bit_length() - 1
            value &= value - 1


def count_of(bits: np.ndarray) -> int:
    """The number of a mask's tokens."""
    return int(np.bitwise_count(bits).sum())


def bits_of(tokens: Iterable[int], num_words: int) -> np.ndarray:
    """The mask of these tokens: uint32 [num_words]."""
    words = np.zeros(num_words, np.uint32)
    some = tokens if isinstance(tokens, np.ndarray) else list(tokens)
    if len(some) > _FEW:
        ids = np.asarray(some, np.int64)
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return words
    for token in some:
        words[token // 32] |= np.uint32(1 << int(token) % 32)
    return words
