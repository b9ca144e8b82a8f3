"""Brings JSON and calls of tools to their end within `max_tokens`: near the limit, masks lose the tokens that lead on.

Without this an answer that reaches the limit is cut where it is, and no client can parse it. The number of tokens that the
answer needs at least is found by following its grammar, always with the token that closes most. While the limit is further
away than that, masks stay as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# With fewer tokens beyond the fewest the model has no choice: a string's last character may take several, and so may an escape.
_SLACK: Final = 4
_TIGHT: Final = 8  # tokens beyond the fewest that must be left behind a token that opens or continues something
_FEW: Final = 16  # tokens that are looked at one by one
_MAX_WATCHED: Final = 512  # tokens before the limit in which masks are looked at
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_IN_NUMBERS: Final = frozenset(b"0123456789+-.eE")
_CLOSERS: Final = b"}])"  # the last one of pythonic calls
_VALUES: Final = b"0123456789tfnTFN"  # the first characters of short values
_BETWEEN_CALLS: Final = b";<"  # what formats of tools write before another call
_SPACES: Final = b" \n\r\t"


@dataclass(slots=True)
class JsonText:
    """Where a text of JSON stands: inside a string, behind a backslash in one, or in a number."""

    in_string: bool = False
    is_escaped: bool = False
    in_number: bool = False

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

    def copy(self) -> "JsonText":
        return JsonText(self.in_string, self.is_escaped, self.in_number)


class JsonVocabulary:
    """A vocabulary's tokens by what they do to a text of JSON, as masks: uint32 words of one bit a token."""

    def __init__(self, vocabulary: "LLTokenizer", num_words: int) -> None:
        self._vocabulary = vocabulary
        self._num_words = num_words

    def prepare(self) -> None:
        """Make all masks, which takes some tenths of a second for 128,000 tokens."""
        assert self.closing and self.closing_string and self.spaces.size

    def text(self, token: int) -> bytes:
        return self._texts[token] if token < len(self._texts) else b""

    def num_tokens(self, text: str) -> int:
        return len(self._vocabulary.tokenize_str(text))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self._vocabulary.eos_tokens)

    @cached_property
    def closing(self) -> list[np.ndarray]:
        """Outside a string, from what closes most to what opens least."""
        closes = self._mask(lambda text: not text.strip(_CLOSERS))
        return [
            _bits_of(self.ends, self._num_words),
            closes,
            *map(self._beginning, (b",", b":", _VALUES, b'"', b"[", b"{", _BETWEEN_CALLS)),
        ]

    @cached_property
    def closing_string(self) -> list[np.ndarray]:
        """Inside a string."""
        closes = self._mask(lambda text: text[0] == _QUOTE and not text[1:].strip(_CLOSERS))
        return [closes, self._beginning(b'"')]

    @cached_property
    def spaces(self) -> np.ndarray:
        return self._mask(lambda text: not text.strip(_SPACES))

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self._vocabulary.decode_bytes([token]) for token in range(self._vocabulary.vocab_size)]

    def _beginning(self, chars: bytes) -> np.ndarray:
        return self._mask(lambda text: text[0] in chars)

    def _mask(self, belongs: Callable[[bytes], bool]) -> np.ndarray:
        return _bits_of((i for i, text in enumerate(self._texts) if text and belongs(text)), self._num_words)


@dataclass(slots=True)
class JsonEnding:
    """The end of one answer. An answer that cannot end in time is left as it is.

    first: the position from which on masks are narrowed where they must be. limit: the position behind the last token that may
    be sampled. can_end: whether the shortest text from `first` on fits before the limit; None before that is known.
    `can_end` is found at `first` alone, so that a matcher which follows the same tokens at another time finds the same."""

    vocabulary: JsonVocabulary
    first: int
    limit: int
    text: JsonText = field(default_factory=JsonText)
    can_end: bool | None = None

    @classmethod
    def of(cls, description: str, vocabulary: JsonVocabulary, begin: int, limit: int) -> "JsonEnding":
        """description: `text.grammar.json_description`. begin: the position of the answer's first token."""
        # Schemas name every key and the type of every value. The shortest text has each key once, and shorter values.
        num_watched = min(vocabulary.num_tokens(description) + 4 * _TIGHT, _MAX_WATCHED)
        return cls(vocabulary, max(begin, limit - num_watched), limit)

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(self.vocabulary.text(token))

    def decide(self, bits: np.ndarray, matcher: "LLMatcher") -> None:
        """Set `can_end`. The matcher has consumed the tokens before `first`; bits: what it allows there."""
        path = self._shortest(matcher, bits, self.text, self.limit - self.first) if bits.any() else None
        self.can_end = path is not None

    def after(self, drafts: Sequence[int]) -> "JsonEnding":
        """The same beyond `drafts`, without a change of this one."""
        ending = replace(self, text=self.text.copy())
        ending.append(drafts)
        return ending

    def narrow(self, bits: np.ndarray, matcher: "LLMatcher", position: int) -> bool:
        """Drop from the mask the tokens after which the answer may not end in time. Returns whether the model lost a choice.

        bits: uint32 [words], what the grammar allows at `position`, behind the tokens of the matcher, which is left as it is.
        """
        if position == self.first and self.can_end is None:
            self.decide(bits, matcher)
        left, text = self.limit - position, self.text
        path = self._shortest(matcher, bits, text, left) if self.can_end and bits.any() else None
        if path is None:
            return False
        if left - len(path) < _SLACK:
            kept = _bits_of(path[:1], len(bits))
        elif _count(bits) <= _FEW:
            kept = self._each_in_time(matcher, bits, text, left)
        elif text.in_string or text.in_number:
            return False
        else:
            kept = self._groups_in_time(matcher, bits, text, left)
        dropped = bits & ~kept & ~self.vocabulary.spaces
        bits &= kept
        return bool(dropped.any())

    def _each_in_time(self, matcher: "LLMatcher", bits: np.ndarray, text: JsonText, left: int) -> np.ndarray:
        """The allowed tokens after which the answer can end within `left` tokens."""

        def is_in_time(token: int) -> bool:
            return self._shortest(matcher, _bits_of([token], len(bits)), text, left) is not None

        return _bits_of(filter(is_in_time, _tokens_of(bits)), len(bits))

    def _groups_in_time(self, matcher: "LLMatcher", bits: np.ndarray, text: JsonText, left: int) -> np.ndarray:
        """As `_each_in_time`, for groups of tokens that do the same between two values, by one token of each."""
        kept: np.ndarray = np.zeros_like(bits)
        rest = bits.copy()
        for group in self.vocabulary.closing:
            both = bits & group
            if not both.any():
                continue
            rest &= ~group
            first = _bits_of([_first_bit(both)], len(bits))
            # The first group that is allowed closes most, and has been found to be in time.
            if not kept.any() or self._shortest(matcher, first, text, left - _TIGHT) is not None:
                kept |= both
        kept |= rest
        return kept

    def _shortest(self, matcher: "LLMatcher", bits: np.ndarray, text: JsonText, most: int) -> list[int] | None:
        """The tokens to the end, with the one that closes most at each position; None if they are more than `most`."""
        text, bits, path, num_consumed = text.copy(), bits.copy(), list[int](), 0
        while len(path) < most:
            token = _first_bit(self._closing(bits, text))
            path.append(token)
            if token in self.vocabulary.ends:
                break
            num_consumed += matcher.try_consume_tokens([token])
            path += (forced := matcher.compute_ff_tokens())
            num_consumed += matcher.try_consume_tokens(forced)
            for each in (token, *forced):
                text.append(self.vocabulary.text(each))
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():
                break
        matcher.rollback(num_consumed)
        return path if len(path) <= most and path and path[-1] in self.vocabulary.ends else None

    def _closing(self, bits: np.ndarray, text: JsonText) -> np.ndarray:
        """The allowed tokens that close most."""
        outside = not text.in_string
        groups = self.vocabulary.closing if outside else [] if text.is_escaped else self.vocabulary.closing_string
        allowed: Iterable[np.ndarray] = (bits & group for group in groups)
        return next((each for each in allowed if each.any()), bits)


def _first_bit(bits: np.ndarray) -> int:
    word = int(np.flatnonzero(bits)[0])
    value = int(bits[word])
    return 32 * word + (value & -value).bit_length() - 1


def _tokens_of(bits: np.ndarray) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]


def _count(bits: np.ndarray) -> int:
    return int(np.unpackbits(bits.view(np.uint8)).sum())


def _bits_of(tokens: Iterable[int], num_words: int) -> np.ndarray:
    ids = np.fromiter(tokens, np.int64)
    words = np.zeros(num_words, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words
