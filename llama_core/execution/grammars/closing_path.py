"""The closing path of an answer of JSON: the tokens to its end, found by following its grammar.

llguidance 1.9.1 caches the last mask under the lexer's state and the number of the parser's row. Other tokens may lead to the
same key, and `rollback` does not clear the cache. So this module never rolls a matcher back: it tries tokens on a copy. A copy
takes microseconds, and some hundred of them behind thousands of tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.grammars.json_vocabulary import JsonText, JsonVocabulary, count_of, first_of, tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_AT_ONCE: Final = 256  # tokens that are tried at one position within a string
_MAX_OTHER: Final = 16  # other tokens than that of the first path that are taken at one position
_SOME_OF_MANY: Final = 4  # tokens that are taken of more than `_MAX_OTHER`
# With so few tokens left, the shortest path is searched. In a whole answer of so few tokens the model may choose another one.
FEW_LEFT: Final = 8
_MAX_TRIED_OF_FEW: Final = 128  # tokens to try for the shortest path
_ALL_OF_FEW: Final = 48  # tokens at one position, all of which are tried


class LimitsExceeded(Exception):
    """A matcher that looks ahead has exceeded llguidance's limits of time and memory."""


@dataclass(slots=True)
class _Choice:
    """A position of a path: the tokens before it, where the text stands, what the grammar allows, and the token taken."""

    before: list[int]
    text: JsonText
    allowed: np.ndarray
    taken: int


@dataclass(slots=True)
class Search:
    """Finds closing paths of at most `most` tokens.

    num_followed: the work so far: tokens of all paths, plus two for each token tried in `_way_out`. max_other: tokens to follow
    beside the first path; 0: look for no other path. max_tried: tokens to try within strings that cannot end everywhere.
    """

    vocabulary: JsonVocabulary
    most: int
    max_other: int = 0
    max_tried: int = 1024
    num_followed: int = 0
    first_path: list[int] = field(default_factory=list)  # as far as it was followed, also where it is too long
    _num_tried: int = 0
    _barren: set[bytes] = field(default_factory=set)  # masks from which a string has no way out

    def path(self, matcher: "LLMatcher", text: JsonText) -> list[int]:
        """The tokens to the end of the answer, the last of which ends it; [] if no path is found. The matcher stays as it is.

        The first path takes the token that closes most at each position. If that path is too long, paths that differ from it by
        one token are tried, the earliest such token first. Raises LimitsExceeded.
        """
        self.first_path = []
        path, choices = self._follow(matcher.deep_copy(), text.copy(), [])
        num_first = self.num_followed
        for choice in choices if not path else ():
            for token in self._other_tokens(choice):
                if self.num_followed - num_first >= self.max_other:
                    return []
                begun = [*choice.before, token]
                behind, text_behind = matcher.deep_copy(), text.copy()
                consume(behind, begun)
                text_behind.append(b"".join(map(self.vocabulary.text, begun)))
                path, _ = self._follow(behind, text_behind, begun)
                if path:
                    return path
        return path

    def shortest(self, matcher: "LLMatcher", text: JsonText) -> list[int]:
        """As `path`, the path with the fewest tokens of those that are tried. For up to `FEW_LEFT` tokens.

        Breadth first; positions with equal masks behind as many tokens count as one."""
        ways, num_tried = [(list[int](), matcher.deep_copy(), text)], 0
        for num_left in range(self.most, 0, -1):
            longer: list[tuple[list[int], LLMatcher, JsonText]] = []
            seen = set[bytes]()
            for way, at, place in ways:
                mask = mask_of(at, self.vocabulary)
                check_limits(at)
                if (ends := mask & self.vocabulary.end_bits).any():
                    return [*way, first_of(ends)]
                if (key := mask.tobytes()) in seen or num_left == 1:
                    continue
                seen.add(key)
                for token in self._likely_short(mask, place)[: _MAX_TRIED_OF_FEW - num_tried]:
                    num_tried += 1
                    behind, place_behind = at.deep_copy(), place.copy()
                    consume(behind, [token])
                    place_behind.append(self.vocabulary.text(token))
                    longer.append(([*way, token], behind, place_behind))
            ways = longer
            self.num_followed += len(ways)
        return []

    def _likely_short(self, mask: np.ndarray, text: JsonText) -> list[int]:
        """The allowed tokens, of many some, which a short path may take. Those that close most come first."""
        vocabulary = self.vocabulary
        rest = mask if text.in_string or not (found := mask & ~vocabulary.spaces).any() else found
        num_each = _ALL_OF_FEW if count_of(rest) <= _ALL_OF_FEW else _SOME_OF_MANY
        tokens: list[int] = []
        for group in vocabulary.closing_string if text.in_string else vocabulary.between:
            tokens += self._shortest_and_longest(rest & group, num_each)
            rest = rest & ~group
        return [*tokens, *self._shortest_and_longest(rest, num_each)]

    def _shortest_and_longest(self, mask: np.ndarray, num_each: int) -> list[int]:
        """Some tokens of the mask, by the lengths of their texts."""
        if not mask.any():
            return []
        tokens = np.array(tokens_of(mask))
        by_length = tokens[np.argsort(self.vocabulary.lengths[tokens], kind="stable")].tolist()
        return [*by_length[:num_each], *by_length[num_each:][-num_each:]]

    def _follow(self, matcher: "LLMatcher", text: JsonText, path: list[int]) -> tuple[list[int], list[_Choice]]:
        """The path that continues `path` with the tokens that close most, [] if it is too long; and the choices on it.

        Advances `matcher` and `text`, which stand behind `path`."""
        vocabulary, begin, choices = self.vocabulary, len(path), list[_Choice]()
        path = list(path)
        mask = np.zeros(vocabulary.num_words, np.uint32)
        while len(path) < self.most:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            check_limits(matcher)
            if not mask.any():
                break
            tokens = self._closing_tokens(matcher, mask, text)
            if self.max_other and count_of(mask) > 1:
                choices.append(_Choice(list(path), text.copy(), mask.copy(), tokens[0]))
            path += tokens
            if tokens[0] in vocabulary.ends:
                break
            consume(matcher, tokens)
            path += (forced := matcher.compute_ff_tokens())
            consume(matcher, forced)
            for each in (*tokens, *forced):
                text.append(vocabulary.text(each))
        check_limits(matcher)
        self.num_followed += len(path) - begin
        self.first_path = self.first_path or path
        is_whole = begin < len(path) <= self.most and path[-1] in vocabulary.ends
        return path if is_whole else [], choices

    def _closing_tokens(self, matcher: "LLMatcher", mask: np.ndarray, text: JsonText) -> list[int]:
        """The token that closes most; several tokens where a string can end only behind them."""
        closing = closing_tokens(self.vocabulary, mask, text)
        if closing is None and self._num_tried < self.max_tried and mask.tobytes() not in self._barren:
            if way := self._way_out(matcher, mask, text):
                return way
            self._barren.add(mask.tobytes())
        return [first_of(mask if closing is None else closing)]

    def _way_out(self, matcher: "LLMatcher", mask: np.ndarray, text: JsonText) -> list[int]:
        """The fewest tokens behind which the string may end or has ended.

        Dijkstra's algorithm over characters; positions with equal masks count as one. Returns [] where this prunes every way,
        as in a string of a fixed length, and where too many tokens were tried."""
        vocabulary = self.vocabulary
        heap: list[tuple[int, int, bool, list[int], JsonText]] = [(0, 0, False, [], text)]
        seen, found = {mask.tobytes()}, np.zeros_like(mask)
        while heap:
            _, _, is_out, way, text_before = heappop(heap)
            if is_out:
                return way
            before = matcher.deep_copy()
            consume(before, way)
            before.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
            choice = found & vocabulary.character_bits
            for token in tokens_of(choice if choice.any() else found)[:_MAX_AT_ONCE]:
                if self._num_tried == self.max_tried:
                    break
                self._num_tried += 1
                self.num_followed += 2  # it takes twice as long as a token of a path
                behind = before.deep_copy()
                consume(behind, [token])
                forced = behind.compute_ff_tokens()
                consume(behind, forced)
                behind.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
                check_limits(behind)
                text_behind = text_before.copy()
                for each in (token, *forced):
                    text_behind.append(vocabulary.text(each))
                is_end = not text_behind.in_string or (
                    not text_behind.is_escaped and closing_tokens(vocabulary, found, text_behind) is not None
                )
                if is_end or (key := found.tobytes()) not in seen:
                    if not is_end:
                        seen.add(key)
                    begun = [*way, token, *forced]
                    heappush(heap, (len(begun), self._num_tried, is_end, begun, text_behind))
        return []

    def _other_tokens(self, choice: _Choice) -> list[int]:
        """Some of the allowed tokens that the first path did not take."""
        vocabulary = self.vocabulary
        if choice.text.is_escaped or not (choice.allowed & vocabulary.beginning_character).any():
            return []
        if not choice.text.in_string:
            groups = (tokens_of(choice.allowed & group) for group in vocabulary.between)
            return [_shortest(vocabulary, group) for group in groups if group and choice.taken not in group]
        characters = choice.allowed & vocabulary.character_bits
        taken = vocabulary.text(choice.taken)[:1]
        other = [
            token
            for token in tokens_of(characters if characters.any() else choice.allowed)
            if vocabulary.text(token)[:1] not in (taken, b'"', b"\\")
        ]
        return other if len(other) <= _MAX_OTHER else other[:: -(-len(other) // _SOME_OF_MANY)]


def closing_tokens(vocabulary: JsonVocabulary, allowed: np.ndarray, text: JsonText) -> np.ndarray | None:
    """The allowed tokens that close most; None within a string that cannot end yet."""
    if text.is_escaped or not (allowed & vocabulary.beginning_character).any():
        return allowed
    groups = vocabulary.closing_string if text.in_string else vocabulary.between
    some: Iterable[np.ndarray] = (allowed & group for group in groups)
    found = next((each for each in some if each.any()), None)
    if found is not None or text.in_string:
        return found
    without_spaces = allowed & ~vocabulary.spaces
    return without_spaces if without_spaces.any() else allowed


def consume(matcher: "LLMatcher", tokens: list[int]) -> None:
    """Consume tokens that the grammar allows. Raises LimitsExceeded.

    Where a limit is exceeded, llguidance 1.9.1 refuses some of the tokens, and `is_error` is true only behind the next mask.
    """
    if matcher.try_consume_tokens(tokens) < len(tokens) and not matcher.is_stopped():
        raise LimitsExceeded


def mask_of(matcher: "LLMatcher", vocabulary: JsonVocabulary) -> np.ndarray:
    """uint32 [words]: the tokens that the grammar allows."""
    bits = np.zeros(vocabulary.num_words, np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


def check_limits(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise LimitsExceeded


def _shortest(vocabulary: JsonVocabulary, tokens: Sequence[int]) -> int:
    return min(tokens, key=lambda token: len(vocabulary.text(token)))
