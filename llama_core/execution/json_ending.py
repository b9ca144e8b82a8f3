"""Brings JSON and calls of tools to their end within `max_tokens`: near the limit, masks lose the tokens that lead on.

Without this an answer that reaches the limit is cut where it is, and no client can parse it. How many tokens the answer needs
to end is found by following its grammar ahead, always with the token that closes most. While the limit is further away than
that, masks stay as they are. Other text before the JSON, such as reasoning, keeps its masks: it is told from JSON by what the
grammar allows.

The closing path, the tokens to the answer's end, is found once and then kept up to date. Behind most tokens the rest of it, or
all of it, is still a path, which the grammar tells in microseconds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# With fewer tokens beyond those of the closing path the model has no choice: a character may take four, and an escape that
# begins with one token for "\\u" five.
_FORCED_BELOW: Final = 5
_MARGIN: Final = 8  # tokens to spare behind a token that stands for a group of tokens
_FEW: Final = 16  # tokens that are tried one by one
_FEW_IN_STRING: Final = 256  # as in an enum
# Tokens of the closing path of a whole answer. Longer ones are left as they are, because looking ahead costs more.
_MAX_PATH: Final = 256
_MAX_TRIED: Final = 1024  # tokens that one closing path tries within strings
_MAX_FOLLOWED: Final = (
    1024  # tokens that are tried for one mask, and those of the paths that are found; about ten milliseconds
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


class JsonVocabulary:
    """A vocabulary's tokens by what they do to a text of JSON, as masks: uint32 words of one bit a token."""

    def __init__(self, vocabulary: "LLTokenizer", num_words: int) -> None:
        self._vocabulary = vocabulary
        self.num_words = num_words

    def prepare(self) -> None:
        """Make all masks, which takes some tenths of a second for 128,000 tokens."""
        assert self.between and self.closing_string and self.leaving_string and self.in_text and self.characters
        assert all(
            mask.size
            for mask in (self.character_bits, self.end_bits, self.in_numbers, self.spaces, self.beginning_character)
        )

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

    begins_with_text: other text may come before the JSON. is_broken: the limits were exceeded, so that later answers need
    another one."""

    def __init__(
        self,
        compiled: "Callable[[], LLMatcher]",
        vocabulary: JsonVocabulary,
        description: str,
        *,
        begins_with_text: bool = False,
    ) -> None:
        """compiled: compiles the grammar. description: `text.grammar.json_description`."""
        self.compiled = compiled
        self.matcher = compiled()
        self.vocabulary = vocabulary
        self.begins_with_text = begins_with_text
        self.is_broken = False
        # Schemas also name the keys that are not required, and the type of every value.
        longest = vocabulary.num_tokens(description) + 8 * _MARGIN
        if begins_with_text:
            longest = longest if all(mask.any() for mask in vocabulary.in_text) else 0
        else:
            path, _ = closing_path(vocabulary, self.matcher.deep_copy(), JsonText(), _MAX_PATH)
            longest = max(longest, 2 * len(path) + 8 * _MARGIN) if path else 0
        self.num_watched = min(longest, _MAX_WATCHED)  # 0: answers are not brought to their end


@dataclass(slots=True)
class _Place:
    """Where an answer stands. text: within its JSON. path: the closing path, empty where the answer cannot end in time, so that
    it is left as it is; None in other text than JSON, and before the watched positions."""

    text: JsonText = field(default_factory=JsonText)
    path: list[int] | None = None

    def copy(self) -> "_Place":
        return _Place(replace(self.text), self.path)


@dataclass(slots=True)
class JsonEnding:
    """The end of one answer.

    first_watched: the position from which on masks are narrowed where they must be. limit: the position behind the last token
    that may be sampled. tokens: those of the answer that `matcher` has consumed. arrived: the last position for which `place`
    is known. is_broken: looking ahead exceeds the limits of a matcher of its own. All of it follows from the answer's tokens
    alone: masks must not depend on when a matcher is made anew from them, nor on other answers.
    """

    ahead: Lookahead
    matcher: "LLMatcher"
    first_watched: int
    limit: int
    place: _Place = field(default_factory=_Place)
    tokens: list[int] = field(default_factory=list)
    arrived: int = -1
    is_broken: bool = False
    has_masks: bool = True  # whether the matcher may have computed masks since tokens were last taken back
    num_followed: int = 0  # tokens that were tried for one mask, and those of the paths that were found

    @classmethod
    def of(cls, ahead: Lookahead, begin: int, limit: int) -> "JsonEnding":
        """begin: the position of the answer's first token."""
        return cls(ahead, ahead.matcher.deep_copy(), max(begin, limit - ahead.num_watched), limit)

    def append(self, tokens: Sequence[int], begin: int) -> None:
        """Follow the answer's next tokens, of which the first is at position `begin`."""
        if self.is_broken:
            return
        before, num_before = self.place.copy(), len(self.tokens)
        self._follow(self.place, tokens, begin)
        if self.matcher.is_error():
            self._renew(num_before)
            self.place = before
            self._follow(self.place, tokens, begin)
            self.is_broken = self.matcher.is_error()

    def narrow(self, bits: np.ndarray, position: int, drafts: Sequence[int] = ()) -> bool:
        """Drop from the mask the tokens after which the answer may not end in time. Returns whether a text was lost.

        bits: uint32 [words], what the grammar allows at `position`. drafts: the tokens before it that are not known to be the
        answer's."""
        if self.is_broken or position < self.first_watched or not bits.any():
            return False
        if self.place.path == [] and not self.ahead.begins_with_text:
            return False
        allowed, num_before = bits.copy(), len(self.tokens)
        lost = self._narrow_behind(bits, position, drafts)
        if self.matcher.is_error():
            bits[:] = allowed
            self._renew(num_before)
            lost = self._narrow_behind(bits, position, drafts)
            if self.matcher.is_error():
                self.is_broken, bits[:] = True, allowed
                return False
        return lost

    def _narrow_behind(self, bits: np.ndarray, position: int, drafts: Sequence[int]) -> bool:
        place = self.place.copy()
        self._follow(place, drafts, position - len(drafts))
        self._arrive(place, position, bits)
        if not drafts and not self.matcher.is_error():
            self.place, self.arrived = place, position
        lost = bool(place.path) and self._narrow(bits, place, position)
        if drafts:
            self._roll_back(len(drafts))
            del self.tokens[-len(drafts) :]
        return lost

    def _renew(self, num_tokens: int) -> None:
        """Compile the grammar again and follow the first tokens of the answer: others may have used up the limits."""
        self.ahead.is_broken = True
        self.matcher = self.ahead.compiled()
        del self.tokens[num_tokens:]
        self.matcher.try_consume_tokens(self.tokens)

    def _roll_back(self, num_tokens: int) -> None:
        """Take back tokens of the matcher, and the masks behind them."""
        if self.has_masks:
            roll_back(self.matcher, num_tokens, np.zeros(self.ahead.vocabulary.num_words, np.uint32))
        else:
            self.matcher.rollback(num_tokens)
        self.has_masks = False

    def _follow(self, place: _Place, tokens: Sequence[int], begin: int) -> None:
        """Follow tokens of which the first is at position `begin`."""
        for position, token in enumerate(tokens, begin):
            self._arrive(place, position)
            self.matcher.try_consume_tokens([token])
            self.tokens.append(token)
            place.text.append(self.ahead.vocabulary.text(token))
            if place.path:
                place.path = self._path_behind(place, token, self.limit - position - 1)

    def _arrive(self, place: _Place, position: int, bits: np.ndarray | None = None) -> None:
        """Find the place at `position`, behind the tokens before it. bits: what the grammar allows there, if that is known."""
        if position < self.first_watched or position == self.arrived or self.matcher.is_error():
            return
        if self.ahead.begins_with_text:
            in_text = self._is_in_text(self._mask() if bits is None else bits, len(self.tokens))
            if in_text:
                place.path = None
                return
            if place.path is None:
                text = self._text_of_json(is_json=in_text is False)
                if text is None:
                    return
                place.text = text
        if place.path is None:
            place.path = self._closing_path(place.text, self.limit - position)

    def _is_in_text(self, bits: np.ndarray, num_tokens: int) -> bool | None:
        """Whether other text than JSON may go on behind the first tokens; None within a character, of which the grammar allows
        the next byte alone."""
        vocabulary = self.ahead.vocabulary
        if not (bits & vocabulary.beginning_character).any():
            return None
        # The first token may be the mark that opens the reasoning.
        is_blank = not any(vocabulary.text(token).strip(_SPACES) for token in islice(self.tokens, num_tokens))
        return is_blank or all((bits & mask).any() for mask in vocabulary.in_text)

    def _text_of_json(self, *, is_json: bool) -> JsonText | None:
        """Where the text stands since its JSON began, behind the last position at which other text could go on. is_json: the
        position is within JSON; else within a character, and the result is None if that is one of other text."""
        num_before = len(self.tokens)
        while num_before:
            self.matcher.rollback(1)
            num_before -= 1
            in_text = self._is_in_text(self._mask(), num_before)
            if in_text:
                break
            is_json = is_json or in_text is False
        since = self.tokens[num_before:]
        self.matcher.try_consume_tokens(since)
        if not is_json:
            return None
        # The first of these tokens leaves the other text, whose last mark may end with ">".
        first, *others = map(self.ahead.vocabulary.text, since)
        text = JsonText()
        text.append(b"".join([first.rpartition(b">")[2] if b">" in first else b"", *others]))
        return text

    def _mask(self) -> np.ndarray:
        self.has_masks = True
        bits = np.zeros(self.ahead.vocabulary.num_words, np.uint32)
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    def _narrow(self, bits: np.ndarray, place: _Place, position: int) -> bool:
        assert place.path
        path, left, vocabulary = place.path, self.limit - position, self.ahead.vocabulary
        self.num_followed = 0
        first = vocabulary.end_bits if path[0] in vocabulary.ends else bits_of(path[:1], len(bits))
        # Where the text is forced, masks may have another division of it into tokens than the path.
        if left - len(path) < _FORCED_BELOW and (bits & first).any():
            kept = bits & first
        elif _count(bits) <= (_FEW_IN_STRING if place.text.in_string else _FEW):
            each = (token for token in tokens_of(bits) if self._fits(token, place, left - 1))
            kept = bits_of(each, len(bits))
        else:
            kept = self._groups_in_time(bits, place, left - 1)
        dropped = bits & ~kept & ~vocabulary.spaces
        bits &= kept
        # Another division of the same text into tokens is no loss.
        continuation = b"".join(map(vocabulary.text, path))
        return any(not continuation.startswith(vocabulary.text(token)) for token in tokens_of(dropped))

    def _groups_in_time(self, bits: np.ndarray, place: _Place, most: int) -> np.ndarray:
        """The allowed tokens without the groups of which the longest token leaves too few."""
        vocabulary, text = self.ahead.vocabulary, place.text
        groups = vocabulary.leaving_string if text.in_string else vocabulary.between
        kept = bits.copy()
        is_first = not (text.in_string or text.in_number)
        for group in groups:
            both = bits & group & ~vocabulary.in_numbers if text.in_number else bits & group
            if not both.any():
                continue
            longest = max(tokens_of(both), key=lambda token: len(vocabulary.text(token)))
            # The first group between two values closes most, and its path has been found to be in time.
            if not is_first and not self._fits(longest, place, most - _MARGIN):
                kept &= ~both
            is_first = False
        return kept

    def _fits(self, token: int, place: _Place, most: int) -> bool:
        """Whether the answer may end within `most` tokens behind `token`."""
        assert place.path
        if token == place.path[0]:
            return len(place.path) - 1 <= most
        if token in self.ahead.vocabulary.ends:
            return True
        if self.num_followed > _MAX_FOLLOWED:
            return most - len(place.path) > 4 * _MARGIN
        if not self.matcher.try_consume_tokens([token]):
            return False
        behind = place.copy()
        behind.text.append(self.ahead.vocabulary.text(token))
        path = self._path_behind(behind, token, most)
        self._roll_back(1)
        return bool(path)

    def _path_behind(self, place: _Place, token: int, most: int) -> list[int]:
        """The closing path behind `token`, which the matcher has consumed; `place.path` is the one before it."""
        assert place.path
        if token == place.path[0]:
            return place.path[1:]
        # The token may stand for any number of the path's, up to one for each of its characters.
        text = self.ahead.vocabulary.text(token)
        within = self._rest_of_character() if text[-1:] >= b"\x80" else []
        for num_replaced in (1, 0, *range(2, min(len(text) + 1, len(place.path)))):
            path = place.path[num_replaced:]
            if path and len(within) + len(path) <= most and self.matcher.validate_tokens(path) == len(path):
                self._roll_back(len(within))
                return within + path
        self._roll_back(len(within))
        return self._closing_path(place.text, most)

    def _rest_of_character(self) -> list[int]:
        """Tokens that end a character within which the matcher stands, which it has consumed."""
        tokens: list[int] = []
        while (mask := self._mask()).any() and not (mask & self.ahead.vocabulary.beginning_character).any():
            tokens.append(_first_of(mask))
            self.matcher.try_consume_tokens(tokens[-1:])
        return tokens

    def _closing_path(self, text: JsonText, most: int) -> list[int]:
        self.has_masks = True
        path, num_tried = closing_path(self.ahead.vocabulary, self.matcher, text, most)
        self.num_followed += num_tried + (len(path) or most)
        return path


def closing_path(vocabulary: JsonVocabulary, matcher: "LLMatcher", text: JsonText, most: int) -> tuple[list[int], int]:
    """The tokens to the end of the answer, with those that close most at each position; none if they are more than `most`. And
    the number of tokens that were tried within strings.

    The matcher is left as it was."""
    mask = np.zeros(vocabulary.num_words, np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    text, path, num_consumed, num_tried, barren = replace(text), list[int](), 0, 0, set[bytes]()
    while len(path) < most and mask.any() and not matcher.is_error():
        closing, tokens = _closing(vocabulary, mask, text), list[int]()
        if closing is None and num_tried < _MAX_TRIED and mask.tobytes() not in barren:
            tokens, num = _way_out(vocabulary, matcher, mask, text, _MAX_TRIED - num_tried)
            num_tried += num
            if not tokens:
                barren.add(mask.tobytes())
        if not tokens:
            tokens = [_first_of(mask if closing is None else closing)]
        path += tokens
        if tokens[0] in vocabulary.ends:
            break
        num_consumed += matcher.try_consume_tokens(tokens)
        path += (forced := matcher.compute_ff_tokens())
        num_consumed += matcher.try_consume_tokens(forced)
        for each in (*tokens, *forced):
            text.append(vocabulary.text(each))
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    roll_back(matcher, num_consumed, mask)
    return path if path and len(path) <= most and path[-1] in vocabulary.ends else [], num_tried


def _closing(vocabulary: JsonVocabulary, bits: np.ndarray, text: JsonText) -> np.ndarray | None:
    """The allowed tokens that close most; None within a string that cannot end yet."""
    if text.is_escaped or not (bits & vocabulary.beginning_character).any():
        return bits
    groups = vocabulary.closing_string if text.in_string else vocabulary.between
    allowed: Iterable[np.ndarray] = (bits & group for group in groups)
    return next((each for each in allowed if each.any()), None if text.in_string else bits)


def _way_out(
    vocabulary: JsonVocabulary, matcher: "LLMatcher", mask: np.ndarray, text: JsonText, most: int
) -> tuple[list[int], int]:
    """The fewest tokens behind which the string may end or has ended, and the number of tokens tried, up to `most`.

    Dijkstra's algorithm over characters. Places with the same mask count as one. No tokens where that prunes all ways, as in a
    string of a certain length, and where `most` is reached."""
    heap: list[tuple[int, int, bool, list[int]]] = [(0, 0, False, [])]
    seen, num_tried, found = {mask.tobytes()}, 0, np.zeros_like(mask)
    while heap:
        _, _, is_out, way = heappop(heap)
        if is_out:
            return way, num_tried
        num_back = matcher.try_consume_tokens(way)
        matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        choice = found & vocabulary.character_bits
        for token in tokens_of(choice if choice.any() else found)[:_FEW_IN_STRING]:
            if num_tried == most:
                break
            num_tried += 1
            matcher.try_consume_tokens([token])
            forced = matcher.compute_ff_tokens()
            num_forced = matcher.try_consume_tokens(forced)
            matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
            behind = replace(text)
            for each in (*way, token, *forced):
                behind.append(vocabulary.text(each))
            is_end = not behind.in_string or (not behind.is_escaped and _closing(vocabulary, found, behind) is not None)
            if is_end or (key := found.tobytes()) not in seen:
                if not is_end:
                    seen.add(key)
                heappush(heap, (len(way) + 1 + len(forced), num_tried, is_end, [*way, token, *forced]))
            roll_back(matcher, 1 + num_forced, found)
        roll_back(matcher, num_back, found)
    return [], num_tried


def roll_back(matcher: "LLMatcher", num_tokens: int, scratch: np.ndarray) -> None:
    """Take back the last tokens that the matcher has consumed, and the masks that it may have computed behind them.

    scratch: uint32 [words]. llguidance keeps the last mask by the lexer's state and the number of the parser's row, which are
    the same behind some other tokens too. Another mask replaces it.
    """
    if num_tokens:
        matcher.rollback(num_tokens)
        matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)


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
