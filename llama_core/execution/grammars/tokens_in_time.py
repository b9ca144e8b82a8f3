"""Which tokens of a mask of JSON are in time: behind them the answer may end before its limit.

A token is in time if a closing path behind it is short enough. Mostly it is the rest of the path that is known, which the
grammar tells in microseconds; else another one is searched. Tokens that begin or end alike are judged by one of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.grammars.closing_path import FEW_LEFT, Search, consume, mask_of
from llama_core.execution.grammars.json_lookahead import MARGIN
from llama_core.execution.grammars.json_vocabulary import (
    SPACES,
    JsonText,
    JsonVocabulary,
    bits_of,
    count_of,
    first_of,
    tokens_of,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_TOKENS: Final = 64  # allowed tokens that are tried one by one at a position outside of strings
_MAX_TOKENS_IN_STRING: Final = 256  # the same inside a string; an enum allows so few
_MAX_TOKENS_IN_CHARACTER: Final = (
    32  # the same within a character; a free string allows 64 bytes there, and longer tokens
)
# The work for one mask, as `Search.num_followed` counts it: some milliseconds for most grammars.
_MAX_FOLLOWED: Final = 512
_MAX_TRIED: Final = 256  # tokens to try behind one token of the mask, within strings that cannot end everywhere
_GUESSED: Final = 128  # a token that was not followed is taken to need so many more than the known path
_CLOSERS: Final = {ord("["): b"]", ord("{"): b"}"}


def are_few(bits: np.ndarray, text: JsonText) -> bool:
    """Whether the tokens that are allowed behind `text` are tried one by one."""
    return count_of(bits) <= (_MAX_TOKENS_IN_STRING if text.in_string else _MAX_TOKENS)


@dataclass(slots=True)
class TokensInTime:
    """Judges the tokens of one mask.

    matcher, text: where the answer stands. path: the closing path there. most: tokens that may follow a token of the mask.
    num_followed: the work so far: tokens tried, and tokens of the paths searched. late_texts: of each late token, the text as
    far as it was followed. most_needed: with fewer tokens left than this, the result may differ. is_any_late: a token was late,
    perhaps only because of a margin.
    """

    vocabulary: JsonVocabulary
    matcher: "LLMatcher"
    text: JsonText
    path: list[int]
    most: int
    num_followed: int = 0
    late_texts: list[bytes] = field(default_factory=list)
    most_needed: int = 0
    is_any_late: bool = False

    def of(self, bits: np.ndarray, *, tries_each: bool) -> np.ndarray:
        """The allowed tokens that are in time. bits: uint32 [words], what the grammar allows, and so is the result. tries_each:
        try one by one also the tokens that only continue a string or a number."""
        return self._few_in_time(bits) if tries_each else self._groups_in_time(bits)

    @property
    def is_guessed(self) -> bool:
        """Whether the last tokens were judged by a guess, because the work had reached `_MAX_FOLLOWED`."""
        return self.num_followed >= _MAX_FOLLOWED

    def _few_in_time(self, bits: np.ndarray) -> np.ndarray:
        spaces = self._spaces_in_time(bits)
        shortest_first = sorted(tokens_of(bits & ~spaces), key=lambda token: len(self.vocabulary.text(token)))
        others = bits_of((token for token in shortest_first if self._fits(token)), len(bits))
        others |= spaces
        return others

    def _spaces_in_time(self, bits: np.ndarray) -> np.ndarray:
        """The allowed spaces within a value, behind which the known path continues as without them. Large vocabularies have
        dozens of such tokens, most of a mask. Behind a whole value, only another call of a tool may follow a space."""
        first = self.path[0]
        is_known = first not in self.vocabulary.ends and bool(self.vocabulary.text(first)[:1].strip(SPACES))
        if self.text.in_string or not is_known or len(self.path) > self.most:
            return np.zeros_like(bits)
        spaces: np.ndarray = bits & self.vocabulary.spaces
        if spaces.any():
            self.most_needed = max(self.most_needed, len(self.path))
        return spaces

    def _groups_in_time(self, bits: np.ndarray) -> np.ndarray:
        """The allowed tokens that are in time. Tokens that only continue a string or a number count as in time, unexamined."""
        vocabulary, text = self.vocabulary, self.text
        if text.in_string:
            late = self._late_behind_string(bits & vocabulary.leaving_string)
        else:
            late = self._late_outside(bits & ~vocabulary.in_numbers if text.in_number else bits)
        return bits & ~bits_of(late, len(bits)) if late else bits.copy()

    def _late_behind_string(self, bits: np.ndarray) -> list[int]:
        """The late ones of the tokens that end the string. Of tokens with the same text behind the string's end, only the
        shortest is tried."""
        late = list[int]()
        for alike in self._alike(bits, self.vocabulary.texts_behind_string):
            if not self._fits(alike[0]):
                late += alike
        return late

    def _late_outside(self, bits: np.ndarray) -> list[int]:
        """The late ones of the tokens outside of a string. Of tokens that begin alike, the longest is tried first, with a
        margin; if it is in time, all are."""
        late = list[int]()
        for alike in self._alike(bits, self.vocabulary.openings):
            if not self.vocabulary.text(alike[0]).strip(SPACES):
                continue
            if len(alike) == 1 or not self._fits(alike[-1], MARGIN):
                late += [token for i, token in enumerate(alike) if i >= _MAX_TOKENS or not self._fits(token)]
        return late

    def _alike(self, bits: np.ndarray, numbers: np.ndarray) -> Iterator[list[int]]:
        """Groups of the tokens in `bits` with the same entry in `numbers`, the shortest token of a group first."""
        tokens = np.array(tokens_of(bits), np.int64)
        if not len(tokens):
            return
        order = np.lexsort((self.vocabulary.lengths[tokens], numbers[tokens]))
        for alike in np.split(tokens[order], np.flatnonzero(np.diff(numbers[tokens][order])) + 1):
            yield alike.tolist()

    def _fits(self, token: int, margin: int = 0) -> bool:
        """Whether the answer may end within `most` tokens behind `token`, with `margin` of them to spare."""
        is_late = not self._is_in_time(token, margin)
        self.is_any_late |= is_late
        return not is_late

    def _is_in_time(self, token: int, margin: int) -> bool:
        """As `_fits`. A token whose text begins a late text counts as late too, without another search."""
        path, text = self.path, self.vocabulary.text(token)
        if token in self.vocabulary.ends:
            return True
        if token == path[0]:
            num_needed = len(path) - 1
        elif text and any(late.startswith(text) for late in self.late_texts):
            # With fewer tokens left than this text has bytes, the search might have ended before the late text was that long.
            self.most_needed = max(self.most_needed, len(text))
            return False
        elif self.num_followed > _MAX_FOLLOWED:
            if self.late_texts:
                return False
            num_needed = len(path) + _GUESSED
        else:
            self.num_followed += 1
            num_late = len(self.late_texts)
            behind = self.path_behind(token, margin)
            if not behind:
                if margin:  # the token may be in time without the margin
                    del self.late_texts[num_late:]
                return False
            num_needed = len(behind)
        self.most_needed = max(self.most_needed, num_needed + margin if num_needed + margin <= self.most else 0)
        return num_needed + margin <= self.most

    def path_behind(self, token: int, margin: int = 0, max_other: int = 0) -> list[int]:
        """The closing path behind `token`, which the matcher has not consumed; [] if none is found that is in time with
        `margin` tokens to spare.

        max_other: as in `Search`."""
        path, vocabulary, most = self.path, self.vocabulary, self.most - margin
        if token == path[0]:
            return path[1:]
        text, within = vocabulary.text(token), list[int]()
        behind = self.matcher
        if text[-1:] >= b"\x80":
            behind = self.matcher.deep_copy()
            consume(behind, [token])
            within = _rest_of_character(behind, vocabulary)
        closers = list(self._closers(text))
        # The token may replace any number of the path's first tokens, up to one for each of its characters. In a string that
        # may end here it mostly replaces none.
        goes_on = self.text.in_string and b'"' not in text and vocabulary.text(path[0])[:1] == b'"'
        for num_replaced in (*((0, 1) if goes_on else (1, 0)), *range(2, min(len(text) + 1, len(path)))):
            for some in (within, *(within + each for each in closers)):
                rest = some + path[num_replaced:] if some or num_replaced else path
                if num_replaced < len(path) and len(rest) <= most and self._is_allowed([token, *rest]):
                    return rest
        behind = self.matcher.deep_copy()
        consume(behind, [token])
        place = self.text.copy()
        place.append(text)
        search = Search(vocabulary, most, max_other) if max_other else Search(vocabulary, most, max_tried=_MAX_TRIED)
        found = search.path(behind, place)
        if not found and max_other and most <= FEW_LEFT:
            found = search.shortest(behind, place)
        self.num_followed += search.num_followed
        if not found:
            self.late_texts.append(text + b"".join(map(vocabulary.text, search.first_path)))
        return found

    def _is_allowed(self, tokens: list[int]) -> bool:
        return bool(self.matcher.validate_tokens(tokens) == len(tokens))

    def _closers(self, text: bytes) -> Iterator[list[int]]:
        """Each sequence of tokens that may close what `text` opens."""
        characters = self.vocabulary.characters
        for closing in _closings(text, self.text.in_string, self.text.is_escaped):
            tokens = [characters.get(closing[i : i + 1]) for i in range(len(closing))]
            if None not in tokens:
                yield [token for token in tokens if token is not None]


@lru_cache(maxsize=2**14)
def _closings(text: bytes, in_string: bool, is_escaped: bool) -> tuple[bytes, ...]:
    """The texts that may close the brackets and the string that `text` opens. Behind a comma or colon: with an empty string."""
    place, brackets, opens_string = JsonText(in_string, is_escaped), b"", False
    for i, char in enumerate(text):
        was_in_string = place.in_string
        place.append(text[i : i + 1])
        if was_in_string:
            continue
        opens_string = place.in_string
        if char in _CLOSERS:
            brackets = _CLOSERS[char] + brackets
        elif brackets[:1] == text[i : i + 1]:
            brackets = brackets[1:]
    if place.in_string:
        return (b'"' + brackets,) if opens_string and not place.is_escaped else ()
    if text.rstrip(SPACES)[-1:] in (b",", b":"):
        return (b'""' + brackets,)
    return (brackets,) if brackets else ()


def _rest_of_character(matcher: "LLMatcher", vocabulary: JsonVocabulary) -> list[int]:
    """Consume the rest of a character of several bytes within which the matcher stands. Returns its tokens."""
    tokens: list[int] = []
    while (mask := mask_of(matcher, vocabulary)).any() and not (mask & vocabulary.beginning_character).any():
        tokens.append(first_of(mask))
        consume(matcher, tokens[-1:])
    return tokens
