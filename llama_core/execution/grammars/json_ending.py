"""Brings JSON and calls of tools to their end within `max_tokens`: near the limit, masks lose the tokens that lead too far.

Without this, an answer that reaches the limit is cut anywhere, and no client can parse it. The closing path is the tokens to
the answer's end, found by following the grammar ahead with the token that closes most strings, lists and objects
(`closing_path`). While the limit is further away than that path is long, masks stay as they are. Other text before the JSON,
such as reasoning, keeps its masks too: what the grammar allows tells it from JSON.

The closing path is found once and then kept up to date. `tokens_in_time` decides which tokens of a mask are in time;
`json_lookahead` keeps the result for the rest of a string and for other answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_core.execution.grammars.closing_path import FEW_LEFT, LimitsExceeded, Search, check_limits, consume, mask_of
from llama_core.execution.grammars.json_lookahead import MAX_OTHER, MAX_WATCHED, KnownMask, Lookahead, Place
from llama_core.execution.grammars.json_outline import JsonOutline
from llama_core.execution.grammars.json_vocabulary import SPACES, JsonText, bits_of, each_of
from llama_core.execution.grammars.tokens_in_time import TokensInTime, are_few

if TYPE_CHECKING:
    from llguidance import LLMatcher

# With fewer tokens beyond those of the closing path the model has no choice: a character may take four, and an escape that
# begins with one token for "\\u" five.
_FORCED_BELOW: Final = 5
_MAX_UNREAD: Final = 64  # tokens before the watched positions that are followed at once
# With these numbers of tokens left, a closing path is searched again for an answer without one, because the model may have
# taken a shorter way. The search is limited to less work, because most answers have not.
_LOOK_AGAIN: Final = frozenset(int(MAX_WATCHED * 0.7**i) for i in range(18))
_MAX_TRIED_AGAIN: Final = 256
_SPACES: Final = frozenset(SPACES[i : i + 1] for i in range(len(SPACES)))


@dataclass(slots=True)
class _Place:
    """The state of an answer at a position.

    text: the state of its JSON. path: the closing path; [] where none is known, so that masks stay as they are; None in other
    text than JSON, and before the watched positions. outline: None where it does not determine what may follow.
    """

    text: JsonText = field(default_factory=JsonText)
    path: list[int] | None = None
    outline: JsonOutline | None = None

    def copy(self) -> "_Place":
        return _Place(self.text.copy(), self.path, self.outline and self.outline.copy())

    def append(self, text: bytes) -> None:
        self.text.append(text)
        if self.outline is not None:
            self.outline.append(text)


@dataclass(slots=True)
class JsonEnding:
    """The end of one answer.

    first_watched: the position from which on masks are narrowed where they must be. limit: the position behind the last token
    that may be sampled; one more where only the JSON can end in time, and not the answer. is_short: the whole answer has few
    tokens, so that the model may choose between the values that fit. tokens: those of the answer that `matcher` has consumed.
    arrived: the last position for which `place` is known. is_broken: looking ahead exceeds the limits even of a matcher of its
    own.

    The state depends on the answer's tokens alone: masks must not depend on when a matcher is made anew from them, nor on other
    answers.
    """

    ahead: Lookahead
    matcher: "LLMatcher"
    first_watched: int
    limit: int
    is_short: bool
    place: _Place = field(default_factory=_Place)
    tokens: list[int] = field(default_factory=list)
    arrived: int = -1
    is_broken: bool = False
    unread: list[int] = field(default_factory=list)  # of the answer, behind `tokens` and before the watched positions
    in_string: KnownMask | None = None  # of the string within which the answer stands

    @classmethod
    def of(cls, ahead: Lookahead, begin: int, limit: int) -> "JsonEnding":
        """begin: the position of the answer's first token."""
        place = _Place(outline=JsonOutline() if ahead.has_outlines else None)
        first_watched = max(begin, limit - ahead.num_watched)
        return cls(ahead, ahead.matcher.deep_copy(), first_watched, limit, limit - begin <= FEW_LEFT, place)

    def copy(self) -> "JsonEnding":
        """A copy, to be advanced by tokens that may not become the answer's."""
        return replace(
            self,
            matcher=self.matcher.deep_copy(),
            place=self.place.copy(),
            tokens=list(self.tokens),
            unread=list(self.unread),
        )

    def append(self, tokens: Sequence[int], begin: int) -> None:
        """Follow the answer's next tokens, of which the first is at position `begin`."""
        # Before the watched positions many tokens are followed at once, which costs less than each alone.
        num_unwatched = max(0, min(len(tokens), self.first_watched - begin))
        self.unread += tokens[:num_unwatched]
        if num_unwatched < len(tokens) or len(self.unread) >= _MAX_UNREAD:
            self._follow_unread()
        for position, token in enumerate(tokens[num_unwatched:], begin + num_unwatched):
            self.is_broken = self.is_broken or not self._within_limits(partial(self._follow, token, position))

    def _follow_unread(self) -> None:
        unread, self.unread = self.unread, []

        def follow() -> None:
            consume(self.matcher, unread)
            self.place.append(b"".join(map(self.ahead.vocabulary.text, unread)))

        if unread and not self.is_broken:
            self.is_broken = not self._within_limits(follow)
            self.tokens += unread

    def narrow(self, bits: np.ndarray, position: int) -> bool:
        """Drop from the mask the tokens after which the answer could not end in time. Returns whether the answer lost a text.

        bits: uint32 [words], what the grammar allows at `position`, behind all tokens that were appended."""
        if position < self.first_watched:
            return False
        self._follow_unread()
        if self.is_broken:
            return False
        kept = self._kept(bits, position)
        if kept is None:
            return False
        dropped = bits & ~kept
        if not dropped.any() or not kept.any():
            return False
        bits &= kept
        # Dropped spaces are no loss, nor is another division of the closing path's text into tokens.
        dropped &= ~self.ahead.vocabulary.spaces
        assert self.place.path
        continuation = b"".join(map(self.ahead.vocabulary.text, self.place.path))
        return any(not continuation.startswith(self.ahead.vocabulary.text(token)) for token in each_of(dropped))

    def _kept(self, bits: np.ndarray, position: int) -> np.ndarray | None:
        """The tokens of the mask behind which the answer can end in time. None where all are kept."""
        known, path, left = self.in_string, self.place.path, self.limit - position
        if known is not None and path and left - len(path) >= _FORCED_BELOW and known.holds(bits, path, left - 1):
            return known.kept  # as of most masks within strings
        if not bits.any() or (path == [] and not self._looks_again(position)):
            return None
        kept: np.ndarray | None = None

        def find() -> None:
            nonlocal kept
            self._arrive(position, bits)
            kept = self._found(bits, position) if self.place.path else None

        return kept if self._within_limits(find) else None

    def _within_limits(self, step: Callable[[], None]) -> bool:
        """Call `step`; if other answers have used up the matcher's limits, again with a newly compiled grammar. Returns False
        where the step alone exceeds the limits."""
        place, num_tokens, arrived, limit = self.place.copy(), len(self.tokens), self.arrived, self.limit
        for is_compiled_again in (False, True):
            try:
                if is_compiled_again:
                    self._renew(num_tokens)
                step()
                check_limits(self.matcher)
                return True
            except LimitsExceeded:
                self.place, self.arrived, self.limit = place.copy(), arrived, limit
        return False

    def _renew(self, num_tokens: int) -> None:
        """Compile the grammar again and follow the answer's first `num_tokens` tokens."""
        self.ahead.is_broken = True
        self.matcher = self.ahead.compiled()
        del self.tokens[num_tokens:]
        try:
            consume(self.matcher, self.tokens)
        except LimitsExceeded:
            self.is_broken = True
            raise

    def _looks_again(self, position: int) -> bool:
        return self.ahead.begins_with_text or self.limit - position in _LOOK_AGAIN

    def _follow(self, token: int, position: int) -> None:
        self._arrive(position)
        if self.place.path:
            self.place.path = self._in_time(self.limit - position - 1).path_behind(token, max_other=MAX_OTHER)
        consume(self.matcher, [token])
        self.tokens.append(token)
        text = self.ahead.vocabulary.text(token)
        self.place.append(text)
        if b'"' in text:
            self.in_string = None  # another string may have begun

    def _arrive(self, position: int, bits: np.ndarray | None = None) -> None:
        """Bring `place` to `position`, behind the tokens that were followed. bits: the mask there, if it is known."""
        if position < self.first_watched or position == self.arrived:
            return
        self.arrived, place = position, self.place
        if self.ahead.begins_with_text:
            in_text = self._is_in_text(
                mask_of(self.matcher, self.ahead.vocabulary) if bits is None else bits, len(self.tokens)
            )
            if in_text:
                place.path = None
                return
            if place.path is None:
                text = self._text_of_json(is_json=in_text is False)
                if text is None:
                    return
                place.text = text
        left = self.limit - position
        if place.path is None:
            place.path = self._searched(Search(self.ahead.vocabulary, left, MAX_OTHER))
        elif not place.path and left in _LOOK_AGAIN:
            place.path = self._searched(Search(self.ahead.vocabulary, left, MAX_OTHER, _MAX_TRIED_AGAIN))

    def _searched(self, search: Search) -> list[int]:
        """The closing path here. With few tokens left, there may be no room for its last token, which ends the answer: the JSON
        is whole."""
        path: list[int] = []
        if search.most <= FEW_LEFT:
            path = replace(search, most=search.most + 1).shortest(self.matcher, self.place.text)
            self.limit += len(path) > search.most
        return path or search.path(self.matcher, self.place.text)

    def _is_in_text(self, bits: np.ndarray, num_tokens: int) -> bool | None:
        """Whether other text than JSON may continue behind the first `num_tokens` tokens. None within a character of several
        bytes, where the mask does not tell."""
        vocabulary = self.ahead.vocabulary
        if not (bits & vocabulary.beginning_character).any():
            return None
        # The first token may be the mark that opens the reasoning.
        is_blank = not any(vocabulary.text(token).strip(SPACES) for token in islice(self.tokens, num_tokens))
        return is_blank or all((bits & mask).any() for mask in vocabulary.in_text)

    def _text_of_json(self, *, is_json: bool) -> JsonText | None:
        """The state of the JSON that began behind the last position at which other text could continue.

        is_json: the position is known to be within JSON. Else it is within a character; None if that belongs to other text."""
        earlier, num_before = self.matcher.deep_copy(), len(self.tokens)
        while num_before:
            # llguidance's cached mask is right after this rollback, because all these positions lie on one path.
            earlier.rollback(1)
            num_before -= 1
            in_text = self._is_in_text(mask_of(earlier, self.ahead.vocabulary), num_before)
            check_limits(earlier)
            if in_text:
                break
            is_json = is_json or in_text is False
        if not is_json:
            return None
        # The first of these tokens may end the other text, by a mark that ends with ">".
        first, *others = map(self.ahead.vocabulary.text, self.tokens[num_before:])
        text = JsonText()
        text.append(b"".join([first.rpartition(b">")[2] if b">" in first else b"", *others]))
        return text

    def _found(self, bits: np.ndarray, position: int) -> np.ndarray | None:
        """As `_kept`, at `place`, where a closing path is known."""
        path, left, vocabulary = self.place.path, self.limit - position, self.ahead.vocabulary
        assert path
        text = self.place.text
        tries_each = are_few(bits, text) and not self._is_in_free_character(bits)
        if left - len(path) < _FORCED_BELOW and not (self.is_short and tries_each):
            first = vocabulary.end_bits if path[0] in vocabulary.ends else bits_of(path[:1], len(bits))
            # Where the text is forced, the mask may divide it into other tokens than the path does.
            forced: np.ndarray = bits & first
            if forced.any():
                return forced
        most = left - 1
        # Where all tokens that continue a string are kept, the mask depends on what follows the string alone.
        is_alike = text.in_string and not text.is_escaped and not tries_each and self._is_in_free_value()
        place = self._place_of(bits, is_alike=is_alike)
        known = None if place is None else self.ahead.known(place)
        if known is None or not known.holds(bits, path, most):
            in_time = self._in_time(most)
            kept = in_time.of(bits, tries_each=tries_each)
            if in_time.is_guessed:  # guesses depend on the number of tokens left, so they are not kept
                return kept
            check_limits(self.matcher)  # beyond the limits, llguidance may refuse tokens that the grammar allows
            # With more tokens left, the search behind a late token goes further and may find an end.
            is_any_late = in_time.is_any_late
            some = kept if (kept != bits).any() else None
            known = KnownMask(bits.tobytes(), path, some, in_time.most_needed, most if is_any_late else None)
            if place is not None:
                self.ahead.keep(place, known)
        if is_alike:
            self.in_string = known
        return known.kept

    def _in_time(self, most: int) -> TokensInTime:
        """A judge of the tokens at this place. most: tokens that may follow each of them."""
        assert self.place.path
        return TokensInTime(self.ahead.vocabulary, self.matcher, self.place.text, self.place.path, most)

    def _place_of(self, bits: np.ndarray, *, is_alike: bool) -> Place | None:
        """A key that determines which tokens of the mask are kept; None if only the whole answer does. is_alike: the same
        tokens are kept at every position of this string with the same mask.

        The outline leaves out spaces. Whether more spaces may follow shows in the mask; earlier spaces matter otherwise only if
        the closing path itself has spaces."""
        outline, path = self.place.outline, tuple(self.place.path or ())
        if outline is None or not outline.text or (outline.in_value and not is_alike):
            return None
        if any(self.ahead.vocabulary.text(token)[:1] in _SPACES for token in path):
            return None
        return outline.text, path, hash(bits.tobytes())

    def _is_in_free_character(self, bits: np.ndarray) -> bool:
        """Whether the answer stands within a character of a string that may be any text: then no byte decides on the end."""
        if self.ahead.has_limited_strings or not self.place.text.in_string:
            return False
        return not (bits & self.ahead.vocabulary.beginning_character).any() and self._is_in_free_value()

    def _is_in_free_value(self) -> bool:
        """Whether what may follow this string does not depend on its text. It does behind a key."""
        path, vocabulary = self.place.path, self.ahead.vocabulary
        assert path
        ending = b"".join(map(vocabulary.text, path[:3])).partition(b'"')[2].lstrip(SPACES)
        return self.ahead.is_string_free and ending[:1] in (b",", b"]", b"}")
