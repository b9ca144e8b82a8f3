"""Keeps the items of lists distinct: masks lose the tokens that complete an item equal to an earlier one of its list.

llguidance has no `uniqueItems`. The grammar's schema is followed without it; which lists have distinct items stands beside the
schema (`text.schema_forms.unique_lists`). Strings, numbers and words are compared (`item_text`), other items are not.

An item is complete with its closing quote, with what follows a number, or with the first letter of true, false and null. Where
the items may run out of values, as those with a pattern may, tokens that lead to no other value are lost too.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llama_core.execution.grammars.item_text import (
    IN_NUMBER,
    NUMBER,
    STRING,
    VALUE,
    ItemText,
    UniqueLists,
    content_of,
    number_of,
)
from llama_core.execution.grammars.json_vocabulary import SPACES, JsonVocabulary, bits_of, count_of, tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

AT_ITS_END: Final = 1  # `may_run_out`
_FEW: Final = 64  # a mask of at most so many tokens is searched token by token where items may run out of values
# The most masks that are computed to look behind one token. Results kept from earlier searches must not change what is found
# within this limit: an answer's masks must be the same when the answer is followed anew.
_MAX_LOOKS: Final = 32

_ENDS_NUMBER: Final = b",]}" + SPACES

_UP_TO_QUOTE: Final = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
# At the end of a string's text: an escape, or the first one of two that make one character.
_PART_OF_ESCAPE: Final = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z|\xed[\xa0-\xaf].\Z", re.DOTALL)
# A text outside of strings that completes no item, unless it ends a number with its first character.
_COMPLETES_NOTHING: Final = re.compile(rb'(?:[^"tfn0-9]|[0-9](?![,\]}\s]))*(?:"[^"]*)?')
_OPENS_LIST_OF_TWO: Final = re.compile(rb"\[.*,", re.DOTALL)


class ItemTokens:
    """A vocabulary's tokens by the items that they may complete, as masks. Takes some tenths of a second for 128,000 tokens."""

    def __init__(self, vocabulary: JsonVocabulary) -> None:
        self.vocabulary = vocabulary
        # Inside a string, the tokens that end it, by what they write before its end.
        self.ending: Mapping[bytes, list[int]] = defaultdict(list)
        ids: dict[str, list[int]] = defaultdict(list)
        for token in range(len(vocabulary.lengths)):
            text = vocabulary.text(token)
            if not text or token in vocabulary.ends:
                continue
            if b"e" in text.lower() and IN_NUMBER.issuperset(text):
                ids["exponents"].append(token)
            if text[0] in _ENDS_NUMBER:
                ids["ending_number"].append(token)
            if _COMPLETES_NOTHING.fullmatch(text) is None:
                ids["outside"].append(token)
            if _OPENS_LIST_OF_TWO.search(text) is not None:
                ids["lists"].append(token)
            if b'"' not in text:
                continue
            ids["quotes"].append(token)
            if (before := _UP_TO_QUOTE.match(text)) is not None:
                self.ending[content_of(before[1])].append(token)
                if _COMPLETES_NOTHING.fullmatch(text[before.end() :]) is None:
                    ids["inside"].append(token)
        names = ("quotes", "inside", "outside", "lists", "ending_number", "exponents")
        # quotes: a quote anywhere. inside: in a string, may complete another item behind the string's end. outside: out of a
        # string, may complete an item that the token begins, or a number. lists: may open a list and complete two items.
        # ending_number: ends a number with its first character. exponents: have the exponent of a number.
        masks = [bits_of(ids[name], vocabulary.num_words) for name in names]
        self.quotes, self.inside, self.outside, self.lists, self.ending_number, self.exponents = masks

    @cached_property
    def by_text(self) -> Mapping[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token in range(len(self.vocabulary.lengths)):
            found.setdefault(self.vocabulary.text(token), []).append(token)
        return found


@dataclass(slots=True)
class _Looks:
    """The search behind one token. left: masks that may still be computed. dead_ends: (state, text so far, earlier items)
    without a way to another item."""

    may_run_out: int
    left: int = _MAX_LOOKS
    dead_ends: set[tuple[int, bytes, frozenset[bytes | float | str]]] = field(default_factory=set)


@dataclass(slots=True)
class UniqueItems:
    """The lists of one answer. The state depends on the answer's tokens alone."""

    tokens: ItemTokens
    text: ItemText

    @classmethod
    def of(cls, tokens: ItemTokens, lists: UniqueLists) -> "UniqueItems":
        return cls(tokens, ItemText(lists, lists.places))

    def copy(self) -> "UniqueItems":
        """Another one for tokens that are not known to be the answer's."""
        return UniqueItems(self.tokens, self.text.copy())

    def append(self, tokens: Iterable[int]) -> None:
        """Follow the answer's next tokens."""
        for token in tokens:
            self._append(token)

    def distinct(self, tokens: Sequence[int]) -> list[int]:
        """The `tokens` up to the first that completes an item equal to an earlier one, without it."""
        copy = self.copy()
        end = next((i for i, token in enumerate(tokens) if not copy._append(token)), len(tokens))
        return list(tokens[:end])

    def narrow(self, bits: np.ndarray, matcher: "LLMatcher") -> None:
        """Drop from the mask the tokens that complete an item equal to an earlier one, and those that lead to no other item.

        bits: uint32 [words], what the grammar allows behind all tokens that were appended, by `matcher`, which stays as it is.
        """
        self._drop_equal(bits)
        of_item = self.text.list_of_item
        if of_item is None or not of_item.earlier or not (may_run_out := self.text.lists.may_run_out(of_item.places)):
            return
        _drop(bits, self._exponents_of_zero(bits))
        is_searched = may_run_out > AT_ITS_END and count_of(bits) <= _FEW
        dead_ends = []
        for token in self._uncertain(bits) if is_searched else self._equal(bits):
            if self._way_out(token, matcher, _Looks(may_run_out)) is None:
                dead_ends.append(token)
        _drop(bits, dead_ends)

    def lead_out(self, bits: np.ndarray) -> bool:
        """Drop from the mask the tokens behind which the item's text equals an earlier one's, so that it could not end. Does
        nothing if no other token is left. Returns whether tokens were dropped."""
        of_item = self.text.list_of_item
        if of_item is None or not of_item.earlier or not (equal := self._equal(bits)):
            return False
        others = bits & ~bits_of(equal, len(bits))
        if not others.any():
            return False
        bits[:] = others
        return True

    def _append(self, token: int) -> bool:
        vocabulary = self.tokens.vocabulary
        return token in vocabulary.ends or self.text.append(vocabulary.text(token))

    def _drop_equal(self, bits: np.ndarray) -> None:
        text, tokens, of_item = self.text, self.tokens, self.text.list_of_item
        if not any(each.is_distinct for each in text.containers):
            candidates = bits & tokens.lists
        elif text.within == STRING:
            content = None if text.is_escaped else b""
            if of_item is not None:
                content = content_of(text.written)
                content = None if text.is_escaped or _is_partial(text.written, content) else content
            if content is not None and of_item is not None:
                _drop(
                    bits, (token for rest in _rests(of_item.earlier, content) for token in tokens.ending.get(rest, ()))
                )
            candidates = bits & (tokens.quotes if content is None else tokens.inside)
        else:
            if of_item is not None and text.within == NUMBER and number_of(text.written) in of_item.earlier:
                bits &= ~tokens.ending_number
            candidates = bits & tokens.outside
        if candidates.any():
            written = tokens.vocabulary.text
            _drop(bits, [each for each in tokens_of(candidates) if not text.copy().append(written(each))])

    def _uncertain(self, bits: np.ndarray) -> list[int]:
        """The allowed tokens behind which the item may become an earlier one. Spaces decide nothing."""
        others = tokens_of(bits & ~self.tokens.vocabulary.spaces)
        if self.text.within == STRING and not self.text.is_escaped and (of_item := self.text.list_of_item) is not None:
            nexts = {rest[:1] for rest in _rests(of_item.earlier, content_of(self.text.written))} | {b"\\"}
            texts = ((token, self.tokens.vocabulary.text(token)) for token in others)
            others = [token for token, text in texts if text[:1] in nexts or b'"' in text]
        return [token for token in others if self._is_uncertain(token)]

    def _equal(self, bits: np.ndarray) -> list[int]:
        """The allowed tokens behind which the item's text is that of an earlier one, not yet complete."""
        text, by_text = self.text, self.tokens.by_text
        of_item = text.list_of_item
        assert of_item is not None
        rests: list[bytes] = []
        if text.within in (VALUE, NUMBER):
            written = text.written if text.within == NUMBER else b""
            rests += _rests(_texts_of_integers(of_item.earlier), written)
        if text.within == STRING:
            rests += _rests(of_item.earlier, content_of(text.written))
        elif text.within == VALUE:
            rests += [b'"' + value for value in of_item.earlier if isinstance(value, bytes)]
            rests += [b" " + rest for rest in rests]
        exponents = [
            token
            for token, number in self._with_exponents(bits)
            if text.within == NUMBER and number_of(number) in of_item.earlier
        ]
        found = bits_of((token for rest in rests if rest for token in by_text.get(rest, ())), len(bits))
        return [*tokens_of(bits & found), *exponents]

    def _with_exponents(self, bits: np.ndarray) -> Iterator[tuple[int, bytes]]:
        """The allowed tokens that go on with a number within its exponent, and the number."""
        if self.text.within not in (VALUE, NUMBER):
            return
        written = self.text.written if self.text.within == NUMBER else b""
        is_begun = b"e" in written.lower()
        for token in tokens_of(bits & (self.tokens.vocabulary.in_numbers if is_begun else self.tokens.exponents)):
            yield token, written + self.tokens.vocabulary.text(token)

    def _exponents_of_zero(self, bits: np.ndarray) -> list[int]:
        """If 0 is an earlier item: the allowed exponents behind a zero, with which the number can only be 0 again."""
        of_item = self.text.list_of_item
        if of_item is None or 0 not in of_item.earlier:
            return []
        return [
            token for token, number in self._with_exponents(bits) if number_of(number.lower().partition(b"e")[0]) == 0
        ]

    def _is_uncertain(self, token: int) -> bool:
        copy = self.copy()
        copy._append(token)
        return copy._may_become_earlier(len(self.text.containers))

    def _may_become_earlier(self, num_containers: int) -> bool:
        """Whether the text of the item so far begins an earlier one. False where the token
        has left the item's list, which is within `num_containers` containers, or opened another one."""
        text, of_item = self.text, self.text.list_of_item
        if of_item is None or len(text.containers) != num_containers:
            return False
        if text.within == NUMBER:
            return any(each.startswith(text.written) for each in _texts_of_integers(of_item.earlier))
        return text.within == VALUE or (
            text.within == STRING and bool(_rests(of_item.earlier, content_of(text.written)))
        )

    def _way_out(self, token: int, matcher: "LLMatcher", looks: _Looks) -> bytes | None:
        """Whether another item can be written behind the token. Returns the shortest text that tells such an item from earlier
        ones, b"" if many do or the search was cut short, and None if there is no such item."""
        copy = self.copy()
        copy._append(token)
        text, of_item = copy.text, copy.text.list_of_item
        assert of_item is not None
        begun = text.within, text.written if text.within in (STRING, NUMBER) else b""
        known = of_item.ways.get(begun, b"")
        if known is None or (known and not _begins_one(of_item.earlier, known)):
            return known or b""
        if (place := (*begun, of_item.earlier)) in looks.dead_ends:
            return None
        if not looks.left:
            return b""
        looks.left -= 1
        behind, bits = matcher.deep_copy(), np.zeros(self.tokens.vocabulary.num_words, np.uint32)
        if behind.try_consume_tokens([token]) != 1:
            return b""
        behind.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if behind.is_error():  # as when it exceeds its limits
            return b""
        is_kept = not self.text.lists.has_first_items(of_item.places)
        goes_on = text.within == NUMBER and (bits & self.tokens.vocabulary.in_numbers).any()
        if count_of(bits) > _FEW or (looks.may_run_out == AT_ITS_END and goes_on):
            if is_kept:
                of_item.ways[begun] = None
            return b""
        copy._drop_equal(bits)
        if looks.may_run_out == AT_ITS_END:
            return b"" if bits.any() else None
        found = copy._way_behind(bits, behind, looks)
        if found and is_kept:
            of_item.ways[begun] = found
        if found is None:
            looks.dead_ends.add(place)
        return found

    def _way_behind(self, bits: np.ndarray, matcher: "LLMatcher", looks: _Looks) -> bytes | None:
        """`_way_out` of the first of the allowed tokens that has one."""
        others = tokens_of(bits & ~self.tokens.vocabulary.spaces)
        uncertain = self._uncertain(bits)
        for token in others:
            if token not in uncertain:
                copy = self.copy()
                copy._append(token)
                text = copy.text
                is_same = text.list_of_item is not None and text.list_of_item.num_before == self._num_before
                return content_of(text.written) if is_same and text.is_kept else b""
        return next((way for each in uncertain if (way := self._way_out(each, matcher, looks)) is not None), None)

    @property
    def _num_before(self) -> int:
        return self.text.containers[-1].num_before if self.text.containers else 0


def _drop(bits: np.ndarray, tokens: Iterable[int]) -> None:
    if dropped := list(tokens):
        bits &= ~bits_of(dropped, len(bits))


def _rests(values: Collection[Any], written: bytes) -> list[bytes]:
    """Of the values that are texts and begin with `written`: what follows it."""
    return [value[len(written) :] for value in values if isinstance(value, bytes) and value.startswith(written)]


def _begins_one(values: Collection[Any], written: bytes) -> bool:
    return bool(_rests(values, written) or _rests(_texts_of_integers(values), written))


def _texts_of_integers(values: Iterable[Any]) -> list[bytes]:
    integers = [value for value in values if isinstance(value, int)]
    return [b"%d" % value for value in integers] + ([b"-0"] if 0 in integers else [])


def _is_partial(written: bytes, content: bytes) -> bool:
    """Whether the string's end may become part of an escape, or of a character of two escapes."""
    return b"\\" in written and _PART_OF_ESCAPE.search(content) is not None
