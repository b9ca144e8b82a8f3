"""Brings JSON and calls of tools to their end within `max_tokens`: near the limit, masks lose the tokens that lead on.

Without this an answer that reaches the limit is cut where it is, and no client can parse it. How many tokens the answer needs
to end is found by following its grammar ahead, always with the token that closes most. While the limit is further away than
that, masks stay as they are. Other text before the JSON, such as reasoning, keeps its masks: it is told from JSON by what the
grammar allows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# With fewer tokens beyond those of the closing path the model has no choice: a character or an escape may take several.
_FORCED_BELOW: Final = 4
_MARGIN: Final = 8  # tokens to spare behind a token that stands for a group of tokens
_FEW: Final = 16  # tokens that are tried one by one
_FEW_IN_STRING: Final = 64  # as in an enum
_MAX_PATH: Final = (
    128  # tokens of the shortest answer; longer ones are left as they are, because looking ahead costs more
)
_MAX_WATCHED: Final = 512  # positions before the limit at which masks may be narrowed
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_IN_NUMBERS: Final = frozenset(b"0123456789+-.eE")
_CLOSERS: Final = b"}])"  # the last one of pythonic calls
_VALUES: Final = b"0123456789tfnTFN"  # the first characters of short values, as JSON and pythonic calls write them
_BETWEEN_CALLS: Final = b";<"  # what formats of tools write before another call
_SPACES: Final = b" \n\r\t"


@dataclass(slots=True)
class JsonText:
    """Where a text of JSON stands: inside a string, behind a backslash in one, or in a number (or a word of such letters)."""

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

    def begin_anew(self) -> None:
        self.in_string = self.is_escaped = self.in_number = False

    def copy(self) -> "JsonText":
        return JsonText(self.in_string, self.is_escaped, self.in_number)


class JsonVocabulary:
    """A vocabulary's tokens by what they do to a text of JSON, as masks: uint32 words of one bit a token."""

    def __init__(self, vocabulary: "LLTokenizer", num_words: int) -> None:
        self._vocabulary = vocabulary
        self.num_words = num_words

    def prepare(self) -> None:
        """Make all masks, which takes some tenths of a second for 128,000 tokens."""
        assert self.between and self.closing_string and self.leaving_string and self.spaces.size

    def text(self, token: int) -> bytes:
        return self._texts[token] if token < len(self._texts) else b""

    def num_tokens(self, text: str) -> int:
        return len(self._vocabulary.tokenize_str(text))

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
        closes = self._mask(lambda text: not text.strip(_CLOSERS + _SPACES) and bool(text.strip(_SPACES)))
        by_first = (b",", b":", _VALUES, b'"', b"[", b"{", _BETWEEN_CALLS)
        return [self.end_bits, closes, *(self._mask(partial(_begins, chars=chars)) for chars in by_first)]

    @cached_property
    def closing_string(self) -> list[np.ndarray]:
        """Inside a string: what ends it and closes more, then all else that begins with its end."""
        closes = self._mask(lambda text: text[0] == _QUOTE and not text[1:].strip(_CLOSERS))
        return [closes, self._mask(lambda text: text[0] == _QUOTE)]

    @cached_property
    def leaving_string(self) -> list[np.ndarray]:
        """Inside a string: the tokens that end it, by the first character behind it."""
        return [self._mask(partial(_goes_on, chars=chars)) for chars in (b",", b":", b"")]

    @cached_property
    def in_numbers(self) -> np.ndarray:
        return self._mask(lambda text: _IN_NUMBERS.issuperset(text))

    @cached_property
    def spaces(self) -> np.ndarray:
        return self._mask(lambda text: not text.strip(_SPACES))

    @cached_property
    def in_text(self) -> list[np.ndarray]:
        """Masks of a line break and of two letters. Free text allows all three; JSON allows no line break within a string, and
        hardly any letters outside."""
        return [self._mask(text.__eq__) for text in (b"\n", b"q", b"z")]

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self._vocabulary.decode_bytes([token]) for token in range(self._vocabulary.vocab_size)]

    def _mask(self, belongs: Callable[[bytes], bool]) -> np.ndarray:
        return bits_of((i for i, text in enumerate(self._texts) if text and belongs(text)), self.num_words)


def _begins(text: bytes, chars: bytes) -> bool:
    first = text.lstrip(_SPACES)[:1]
    return bool(first) and first in chars


def _goes_on(text: bytes, chars: bytes) -> bool:
    """Whether a token's text inside a string ends it and goes on with one of `chars`; without any, with all else that opens."""
    behind = _behind(text)
    if chars:
        return _begins(behind, chars)
    return bool(behind.strip(_CLOSERS + _SPACES)) and not _begins(behind, b",:")


def _behind(text: bytes) -> bytes:
    """Of a token's text inside a string, what comes behind the string's end; nothing where it does not end the string."""
    place = JsonText(in_string=True)
    for i in range(len(text)):
        place.append(text[i : i + 1])
        if not place.in_string:
            return text[i + 1 :]
    return b""


class Lookahead:
    """A grammar compiled for looking ahead. Its matchers are apart from those that decide masks, because llguidance's limits of
    one request may be exceeded by looking ahead alone, and matchers made from one another share what they have built.

    begins_with_text: other text may come before the JSON. is_broken: the limits were exceeded, so that the answers that follow
    are left as they are."""

    def __init__(
        self, matcher: "LLMatcher", vocabulary: JsonVocabulary, description: str, *, begins_with_text: bool = False
    ) -> None:
        """description: `text.grammar.json_description`."""
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.begins_with_text = begins_with_text
        self.is_broken = False
        # Schemas also name the keys that are not required, and the type of every value.
        longest = vocabulary.num_tokens(description) + 8 * _MARGIN
        if begins_with_text:
            longest = longest if all(mask.any() for mask in vocabulary.in_text) else 0
        else:
            path = closing_path(vocabulary, matcher.deep_copy(), None, JsonText(), _MAX_PATH)
            longest = 0 if path is None else max(longest, 2 * len(path) + 8 * _MARGIN)
        self.num_watched = min(longest, _MAX_WATCHED)  # 0: answers are not brought to their end


@dataclass(slots=True)
class JsonEnding:
    """The end of one answer. An answer that cannot end in time is left as it is.

    first_watched: the position from which on masks are narrowed where they must be. limit: the position behind the last token
    that may be sampled. could_end: whether the closing path from `first_watched` on, or from where JSON begins behind it, fits
    before the limit; None before that is known, and in other text than JSON. It is found at that position alone: masks must not
    depend on when a matcher is made anew from the same tokens. judged: the last position at which it was found.
    """

    ahead: Lookahead
    matcher: "LLMatcher"
    first_watched: int
    limit: int
    text: JsonText = field(default_factory=JsonText)
    could_end: bool | None = None
    judged: int = -1

    @classmethod
    def of(cls, ahead: Lookahead, begin: int, limit: int) -> "JsonEnding":
        """begin: the position of the answer's first token."""
        return cls(ahead, ahead.matcher.deep_copy(), max(begin, limit - ahead.num_watched), limit)

    def append(self, tokens: Sequence[int], begin: int) -> None:
        """Follow the answer's next tokens, of which the first is at position `begin`."""
        self.could_end, _ = self._followed(tokens, begin, self.text)

    def narrow(self, bits: np.ndarray, position: int, drafts: Sequence[int] = ()) -> bool:
        """Drop from the mask the tokens after which the answer may not end in time. Returns whether a text was lost.

        bits: uint32 [words], what the grammar allows at `position`. drafts: the tokens before it that are not known to be the
        answer's."""
        if self.ahead.is_broken or position < self.first_watched or not bits.any():
            return False
        if self.could_end is False and not self.ahead.begins_with_text:
            return False
        text = self.text.copy()
        could_end, num_followed = self._followed(drafts, position - len(drafts), text)
        could_end = self._ends_in_time(could_end, bits, text, position)
        if not drafts:
            self.could_end, self.text, self.judged = could_end, text, position
        lost = bool(could_end) and self._narrow(bits, text, self.limit - position)
        self.matcher.rollback(num_followed)
        return lost

    def _followed(self, tokens: Sequence[int], begin: int, text: JsonText) -> tuple[bool | None, int]:
        """Follow tokens of which the first is at position `begin`. Returns `could_end` behind them, and the number that the
        matcher has consumed."""
        could_end = self.could_end
        num_done = min(max(0, self.first_watched - begin), len(tokens))
        num_followed = self._follow(tokens[:num_done], text)
        while num_done < len(tokens) and (could_end is None or self.ahead.begins_with_text):
            if begin + num_done != self.judged:
                could_end = self._ends_in_time(could_end, None, text, begin + num_done)
            num_followed += self._follow(tokens[num_done : num_done + 1], text)
            num_done += 1
        return could_end, num_followed + self._follow(tokens[num_done:], text)

    def _ends_in_time(
        self, could_end: bool | None, bits: np.ndarray | None, text: JsonText, position: int
    ) -> bool | None:
        """`could_end` at `position`, from that of the position before. bits: what the grammar allows there, if that is known.

        Where JSON begins behind other text, `text` begins anew."""
        if self.ahead.begins_with_text and self._is_in_text(bits):
            return None
        if could_end is not None:
            return could_end
        if self.ahead.begins_with_text:
            text.begin_anew()
        return self._closing_path(None, text, self.limit - position) is not None

    def _is_in_text(self, bits: np.ndarray | None) -> bool:
        if bits is None:
            bits = np.zeros(self.ahead.vocabulary.num_words, np.uint32)
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return all((bits & mask).any() for mask in self.ahead.vocabulary.in_text)

    def _narrow(self, bits: np.ndarray, text: JsonText, left: int) -> bool:
        path = self._closing_path(bits, text, left)
        if path is None:
            return False
        vocabulary = self.ahead.vocabulary
        if left - len(path) < _FORCED_BELOW:
            kept = bits & vocabulary.end_bits if path[0] in vocabulary.ends else bits_of(path[:1], len(bits))
        elif _count(bits) <= (_FEW_IN_STRING if text.in_string else _FEW):
            each = (token for token in tokens_of(bits) if self._fits([token], text, left))
            kept = bits_of(each, len(bits))
        else:
            kept = self._groups_in_time(bits, text, left)
        dropped = bits & ~kept & ~vocabulary.spaces
        bits &= kept
        # Another division of the same text into tokens is no loss.
        continuation = b"".join(map(vocabulary.text, path))
        return any(not continuation.startswith(vocabulary.text(token)) for token in tokens_of(dropped))

    def _groups_in_time(self, bits: np.ndarray, text: JsonText, left: int) -> np.ndarray:
        """The allowed tokens without the groups of which the longest token leaves too few."""
        vocabulary = self.ahead.vocabulary
        groups = vocabulary.leaving_string if text.in_string else vocabulary.between
        kept = bits.copy()
        is_first = not (text.in_string or text.in_number)
        for group in groups:
            both = bits & group & ~vocabulary.in_numbers if text.in_number else bits & group
            if not both.any():
                continue
            longest = max(tokens_of(both), key=lambda token: len(vocabulary.text(token)))
            # The first group between two values closes most, and its path has been found to be in time.
            if not is_first and not self._fits([longest], text, left - _MARGIN):
                kept &= ~both
            is_first = False
        return kept

    def _fits(self, tokens: Sequence[int], text: JsonText, left: int) -> bool:
        return self._closing_path(bits_of(tokens, self.ahead.vocabulary.num_words), text, left) is not None

    def _closing_path(self, bits: np.ndarray | None, text: JsonText, most: int) -> list[int] | None:
        path = closing_path(self.ahead.vocabulary, self.matcher, bits, text, most)
        self.ahead.is_broken = self.ahead.is_broken or self.matcher.is_error()
        return path

    def _follow(self, tokens: Sequence[int], text: JsonText) -> int:
        for token in tokens:
            text.append(self.ahead.vocabulary.text(token))
        return int(self.matcher.try_consume_tokens(list(tokens)))


def closing_path(
    vocabulary: JsonVocabulary, matcher: "LLMatcher", bits: np.ndarray | None, text: JsonText, most: int
) -> list[int] | None:
    """The tokens to the end of the answer, with the one that closes most at each position; None if they are more than `most`.

    bits: the choice of the first token; None for all that the matcher allows. The matcher is left as it was."""
    mask = np.zeros(vocabulary.num_words, np.uint32)
    if bits is None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    else:
        mask[:] = bits
    text, path, num_consumed = text.copy(), list[int](), 0
    while len(path) < most and mask.any() and not matcher.is_error():
        token = _first_of(_closing(vocabulary, mask, text))
        path.append(token)
        if token in vocabulary.ends:
            break
        num_consumed += matcher.try_consume_tokens([token])
        path += (forced := matcher.compute_ff_tokens())
        num_consumed += matcher.try_consume_tokens(forced)
        for each in (token, *forced):
            text.append(vocabulary.text(each))
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    matcher.rollback(num_consumed)
    return path if path and len(path) <= most and path[-1] in vocabulary.ends else None


def _closing(vocabulary: JsonVocabulary, bits: np.ndarray, text: JsonText) -> np.ndarray:
    """The allowed tokens that close most."""
    outside = not text.in_string
    groups = vocabulary.between if outside else [] if text.is_escaped else vocabulary.closing_string
    allowed: Iterable[np.ndarray] = (bits & group for group in groups)
    return next((each for each in allowed if each.any()), bits)


def _first_of(bits: np.ndarray) -> int:
    word = int(np.flatnonzero(bits)[0])
    value = int(bits[word])
    return 32 * word + (value & -value).bit_length() - 1


def tokens_of(bits: np.ndarray) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return found


def _count(bits: np.ndarray) -> int:
    return int(np.unpackbits(bits.view(np.uint8)).sum())


def bits_of(tokens: Iterable[int], num_words: int) -> np.ndarray:
    ids = np.fromiter(tokens, np.int64)
    words = np.zeros(num_words, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words
