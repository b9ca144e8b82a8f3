"""Keeps the items of lists distinct: masks lose the tokens that complete an item equal to an earlier one of its list.

llguidance has no `uniqueItems`. The grammar's schema is followed without it; which lists have distinct items stands beside the
schema (`text.schema_forms.unique_lists`). Strings, numbers and words are compared as JSON schema does: 1 equals 1.0, "a" equals
"\\u0061", and 1 does not equal true. Other items are not compared.

An item is complete with its closing quote, with what follows a number, or with the first letter of true, false and null. Where
the items may run out of values, as those with a pattern may, tokens that lead to no other value are lost too.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from llama_core.execution.json_vocabulary import SPACES, JsonVocabulary, bits_of, count_of, tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

AT_ITS_END: Final = 1  # `may_run_out`
_FEW: Final = 64  # tokens of a mask, each of which is looked behind where items may run out of values
# Masks that are computed to look behind one token. What is kept of earlier looks must not change what is found within them: the
# masks of an answer are the same where it is followed anew.
_MAX_LOOKS: Final = 32
_MAX_DIGITS: Final = 4000  # of a number that is compared by its value; Python refuses integers of 4300

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_IN_NUMBER: Final = frozenset(b"0123456789+-.eE")
_BEGINS_NUMBER: Final = frozenset(b"0123456789-")
_WORDS: Final = {ord("t"): "true", ord("f"): "false", ord("n"): "null"}
_ENDS_NUMBER: Final = b",]}" + SPACES

_UP_TO_QUOTE: Final = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_PLAIN: Final = re.compile(rb'[^"\\]*')
_ESCAPES: Final = re.compile(rb"(?:\\u[0-9a-fA-F]{4})+|\\[^u]")
# At the end of a string's text: an escape, or the first one of two that make one character.
_PART_OF_ESCAPE: Final = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z|\xed[\xa0-\xaf].\Z", re.DOTALL)
# A text outside of strings that completes no item, unless it ends a number with its first character.
_COMPLETES_NOTHING: Final = re.compile(rb'(?:[^"tfn0-9]|[0-9](?![,\]}\s]))*(?:"[^"]*)?')
_OPENS_LIST_OF_TWO: Final = re.compile(rb"\[.*,", re.DOTALL)

_Places = tuple[int, ...]  # states of `UniqueLists`, any of which may hold


class UniqueLists:
    """The lists of a schema with distinct items, by the way to them. places: those of the whole value."""

    def __init__(self, written: Mapping[str, Any]) -> None:
        """written: as `text.schema_forms.unique_lists` writes them. Raises LookupError or TypeError for anything else."""
        self.places: _Places = tuple(written["root"])
        self._states: Sequence[Mapping[str, Any]] = written["states"]
        self._found: dict[tuple[_Places, bytes | int], _Places] = {}

    def item(self, places: _Places, index: int) -> _Places:
        """places: those of the list."""
        if not places:
            return ()
        longest = max(len(self._states[place].get("first", ())) for place in places)
        return self._behind(places, min(index, longest))

    def property(self, places: _Places, name: bytes) -> _Places:
        """places: those of the object. name: UTF-8."""
        return self._behind(places, name) if places else ()

    def are_distinct(self, places: _Places) -> bool:
        return any(self._states[place].get("is_unique") for place in places)

    def may_run_out(self, places: _Places) -> int:
        """0: an item that was begun can always become another one. AT_ITS_END: all but one that is whole. More: it may not."""
        return max((self._states[place].get("may_run_out", 0) for place in places), default=0)

    def has_first_items(self, places: _Places) -> bool:
        return any("first" in self._states[place] for place in places)

    def _behind(self, places: _Places, step: bytes | int) -> _Places:
        found = self._found.get((places, step))
        if found is None:
            if len(self._found) > 4096:  # names are the model's
                self._found.clear()
            behind = {each for place in places for each in _behind(self._states[place], step)}
            found = self._found[places, step] = tuple(sorted(behind))
        return found


def _behind(state: Mapping[str, Any], step: bytes | int) -> Sequence[int]:
    """The states of an item by its index, or of a property by its name."""
    found: Sequence[int]
    if isinstance(step, int):
        first = state.get("first", ())
        found = first[step] if step < len(first) else state.get("items", ())
    else:
        named = state.get("names", {}).get(step.decode(errors="replace"))
        found = state.get("others", ()) if named is None else named
    return found


class ItemTokens:
    """A vocabulary's tokens by which items they complete. Takes some tenths of a second for 128,000 tokens."""

    def __init__(self, vocabulary: JsonVocabulary) -> None:
        self.vocabulary = vocabulary
        # Inside a string, the tokens that end it, by what they write before its end.
        self.ending: Mapping[bytes, list[int]] = defaultdict(list)
        ids: dict[str, list[int]] = defaultdict(list)
        for token in range(len(vocabulary.lengths)):
            text = vocabulary.text(token)
            if not text or token in vocabulary.ends:
                continue
            if b"e" in text.lower() and _IN_NUMBER.issuperset(text):
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
                self.ending[_content(before[1])].append(token)
                if _COMPLETES_NOTHING.fullmatch(text[before.end() :]) is None:
                    ids["inside"].append(token)
        names = ("quotes", "inside", "outside", "lists", "ending_number", "exponents")
        # With a quote anywhere; inside a string, what may complete an item behind its end; outside of strings, what may
        # complete an item that it begins, or a number; what may open a list and complete two items; what ends a number at once.
        masks = [bits_of(ids[name], vocabulary.num_words) for name in names]
        self.quotes, self.inside, self.outside, self.lists, self.ending_number, self.exponents = masks

    @cached_property
    def by_text(self) -> Mapping[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token in range(len(self.vocabulary.lengths)):
            found.setdefault(self.vocabulary.text(token), []).append(token)
        return found


class _Container(NamedTuple):
    """An object or a list that is open. places: of itself. earlier: the items of a list that `is_distinct`. num_before: items
    before the one that comes next or was begun. ways: by what is written of an item, a text with which it goes on and which
    begins no earlier one; None where it has many."""

    is_list: bool
    places: _Places
    is_distinct: bool
    earlier: frozenset[bytes | float | str] = frozenset()
    num_before: int = 0
    ways: dict[tuple[int, bytes], bytes | None] = {}  # noqa: RUF012 - each container has its own


# What the text is within, or what comes next.
_VALUE, _KEY, _STRING, _NUMBER, _COMPLETE = range(5)


@dataclass(slots=True)
class _Text:
    """Where a text of JSON stands.

    places: of the value that comes next or was begun. written: of a string or a number, if it is compared or is a name that
    leads to lists. is_kept: whether it is."""

    lists: UniqueLists
    places: _Places
    containers: list[_Container] = field(default_factory=list)
    within: int = _VALUE
    written: bytes = b""
    is_kept: bool = False
    is_name: bool = False
    is_escaped: bool = False

    def copy(self) -> "_Text":
        how = self.written, self.is_kept, self.is_name, self.is_escaped
        # `replace` takes three times as long.
        return _Text(self.lists, self.places, list(self.containers), self.within, *how)

    @property
    def list_of_item(self) -> _Container | None:
        """The list whose items are distinct and of which the text writes an item, or is between them."""
        if not self.containers or (self.within == _STRING and self.is_name):
            return None
        last = self.containers[-1]
        return last if last.is_distinct else None

    def append(self, text: bytes) -> bool:
        """Returns whether all items that the text completes are distinct."""
        at, is_distinct = 0, True
        while at < len(text):
            if self.within == _STRING:
                at = self._append_in_string(text, at)
                if self.within == _COMPLETE:
                    is_distinct &= self._complete(_content(self.written) if self.is_kept else b"")
                continue
            char = text[at]
            at += 1
            if self.within == _NUMBER:
                if char in _IN_NUMBER:
                    self.written += text[at - 1 : at] if self.is_kept else b""
                    continue
                self.within = _COMPLETE
                is_distinct &= not self.is_kept or self._complete(_number(self.written))
            if self.within == _VALUE:
                is_distinct &= self._begin_value(char)
            elif char == _QUOTE:
                self._begin(_STRING, is_name=True)
            elif char in b"]}":
                self._close()
            elif char == _COMMA and self.containers:
                self._go_on()
        return is_distinct

    def _append_in_string(self, text: bytes, at: int) -> int:
        """Returns where the string ends, or the text does."""
        while at < len(text):
            if self.is_escaped:
                end, self.is_escaped = at + 1, False
            else:
                found = _PLAIN.match(text, at)
                assert found is not None
                end = found.end()
                if end < len(text) and text[end] == _QUOTE:
                    self.written += text[at:end] if self.is_kept else b""
                    self.within = _COMPLETE
                    if self.is_name:
                        name = _content(self.written) if self.is_kept else b""
                        self.places = self.lists.property(self.containers[-1].places, name) if self.is_kept else ()
                        self.within = _VALUE
                    return end + 1
                if end < len(text):
                    end, self.is_escaped = end + 1, True
            self.written += text[at:end] if self.is_kept else b""
            at = end
        return at

    def _begin_value(self, char: int) -> bool:
        if char == _QUOTE:
            self._begin(_STRING)
        elif char in _BEGINS_NUMBER:
            self._begin(_NUMBER)
            self.written = bytes([char])
        elif char in b"[{":
            is_list = char == ord("[")
            is_distinct = is_list and self.lists.are_distinct(self.places)
            self.containers.append(_Container(is_list, self.places, is_distinct, ways={}))
            self.within = _VALUE if is_list else _KEY
            self.places = self.lists.item(self.places, 0) if is_list else ()
        elif char in b"]}":
            self._close()
        elif char in _WORDS:
            self.within = _COMPLETE
            return self._complete(_WORDS[char])
        return True

    def _begin(self, within: int, *, is_name: bool = False) -> None:
        last = self.containers[-1] if self.containers else None
        self.within, self.is_name, self.written, self.is_escaped = within, is_name, b"", False
        self.is_kept = last is not None and (bool(last.places) if is_name else last.is_distinct)

    def _close(self) -> None:
        if self.containers:
            self.containers.pop()
        self.within = _COMPLETE

    def _go_on(self) -> None:
        last = self.containers[-1]
        self.within, self.places = _KEY, ()
        if last.is_list:
            num_before = last.num_before + 1
            self.containers[-1] = last._replace(num_before=num_before)
            self.within, self.places = _VALUE, self.lists.item(last.places, num_before)

    def _complete(self, value: bytes | float | str) -> bool:
        last = self.containers[-1] if self.containers else None
        if last is None or not last.is_distinct:
            return True
        if value in last.earlier:
            return False
        self.containers[-1] = last._replace(earlier=last.earlier | {value})
        return True


@dataclass(slots=True)
class _Looks:
    """Behind one token. dead_ends: what was written of items, and the earlier ones, where there was no way out."""

    may_run_out: int
    left: int = _MAX_LOOKS
    dead_ends: set[tuple[int, bytes, frozenset[bytes | float | str]]] = field(default_factory=set)


@dataclass(slots=True)
class UniqueItems:
    """The lists of one answer. All of it follows from the answer's tokens alone."""

    tokens: ItemTokens
    text: _Text

    @classmethod
    def of(cls, tokens: ItemTokens, lists: UniqueLists) -> "UniqueItems":
        return cls(tokens, _Text(lists, lists.places))

    def copy(self) -> "UniqueItems":
        """Another one for tokens that are not known to be the answer's."""
        return UniqueItems(self.tokens, self.text.copy())

    def append(self, tokens: Iterable[int]) -> None:
        """Follow the answer's next tokens."""
        for token in tokens:
            self._append(token)

    def distinct(self, tokens: Sequence[int]) -> list[int]:
        """The first of the answer's next tokens that complete no item again."""
        copy = self.copy()
        end = next((i for i, token in enumerate(tokens) if not copy._append(token)), len(tokens))
        return list(tokens[:end])

    def narrow(self, bits: np.ndarray, matcher: "LLMatcher") -> None:
        """Drop from the mask the tokens that complete an item again, and those that lead to no other.

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
        """Drop from the mask, if others are left, the tokens behind which the item may not end, because its text is that of an
        earlier one. Returns whether there were such tokens."""
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
        elif text.within == _STRING:
            content = None if text.is_escaped else b""
            if of_item is not None:
                content = _content(text.written)
                content = None if text.is_escaped or _is_partial(text.written, content) else content
            if content is not None and of_item is not None:
                _drop(
                    bits, (token for rest in _rests(of_item.earlier, content) for token in tokens.ending.get(rest, ()))
                )
            candidates = bits & (tokens.quotes if content is None else tokens.inside)
        else:
            if of_item is not None and text.within == _NUMBER and _number(text.written) in of_item.earlier:
                bits &= ~tokens.ending_number
            candidates = bits & tokens.outside
        if candidates.any():
            written = tokens.vocabulary.text
            _drop(bits, [each for each in tokens_of(candidates) if not text.copy().append(written(each))])

    def _uncertain(self, bits: np.ndarray) -> list[int]:
        """The allowed tokens behind which the item may become an earlier one. Spaces decide nothing."""
        others = tokens_of(bits & ~self.tokens.vocabulary.spaces)
        if self.text.within == _STRING and not self.text.is_escaped and (of_item := self.text.list_of_item) is not None:
            nexts = {rest[:1] for rest in _rests(of_item.earlier, _content(self.text.written))} | {b"\\"}
            texts = ((token, self.tokens.vocabulary.text(token)) for token in others)
            others = [token for token, text in texts if text[:1] in nexts or b'"' in text]
        return [token for token in others if self._is_uncertain(token)]

    def _equal(self, bits: np.ndarray) -> list[int]:
        """The allowed tokens behind which the item's text is that of an earlier one, not yet complete."""
        text, by_text = self.text, self.tokens.by_text
        of_item = text.list_of_item
        assert of_item is not None
        rests: list[bytes] = []
        if text.within in (_VALUE, _NUMBER):
            written = text.written if text.within == _NUMBER else b""
            rests += _rests(_texts_of_integers(of_item.earlier), written)
        if text.within == _STRING:
            rests += _rests(of_item.earlier, _content(text.written))
        elif text.within == _VALUE:
            rests += [b'"' + value for value in of_item.earlier if isinstance(value, bytes)]
            rests += [b" " + rest for rest in rests]
        exponents = [
            token
            for token, number in self._with_exponents(bits)
            if text.within == _NUMBER and _number(number) in of_item.earlier
        ]
        found = bits_of((token for rest in rests if rest for token in by_text.get(rest, ())), len(bits))
        return [*tokens_of(bits & found), *exponents]

    def _with_exponents(self, bits: np.ndarray) -> Iterator[tuple[int, bytes]]:
        """The allowed tokens that go on with a number within its exponent, and the number."""
        if self.text.within not in (_VALUE, _NUMBER):
            return
        written = self.text.written if self.text.within == _NUMBER else b""
        is_begun = b"e" in written.lower()
        for token in tokens_of(bits & (self.tokens.vocabulary.in_numbers if is_begun else self.tokens.exponents)):
            yield token, written + self.tokens.vocabulary.text(token)

    def _exponents_of_zero(self, bits: np.ndarray) -> list[int]:
        """If 0 is an item, the allowed tokens with which an item can be nothing else."""
        of_item = self.text.list_of_item
        if of_item is None or 0 not in of_item.earlier:
            return []
        return [
            token for token, number in self._with_exponents(bits) if _number(number.lower().partition(b"e")[0]) == 0
        ]

    def _is_uncertain(self, token: int) -> bool:
        copy = self.copy()
        copy._append(token)
        return copy._may_become_earlier(len(self.text.containers))

    def _may_become_earlier(self, num_containers: int) -> bool:
        """Whether what is written of an item begins an earlier one, in a list within so many containers."""
        text, of_item = self.text, self.text.list_of_item
        if of_item is None or len(text.containers) != num_containers:
            return False
        if text.within == _NUMBER:
            return any(each.startswith(text.written) for each in _texts_of_integers(of_item.earlier))
        return text.within == _VALUE or (
            text.within == _STRING and bool(_rests(of_item.earlier, _content(text.written)))
        )

    def _way_out(self, token: int, matcher: "LLMatcher", looks: _Looks) -> bytes | None:
        """The text of an item that goes on behind the token, as far as it is needed to tell it from earlier ones, b"" for any
        other; None where there surely is none."""
        copy = self.copy()
        copy._append(token)
        text, of_item = copy.text, copy.text.list_of_item
        assert of_item is not None
        begun = text.within, text.written if text.within in (_STRING, _NUMBER) else b""
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
        goes_on = text.within == _NUMBER and (bits & self.tokens.vocabulary.in_numbers).any()
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
        """`_way_out` of any of the allowed tokens."""
        others = tokens_of(bits & ~self.tokens.vocabulary.spaces)
        uncertain = self._uncertain(bits)
        for token in others:
            if token not in uncertain:
                copy = self.copy()
                copy._append(token)
                text = copy.text
                is_same = text.list_of_item is not None and text.list_of_item.num_before == self._num_before
                return _content(text.written) if is_same and text.is_kept else b""
        return next((way for each in uncertain if (way := self._way_out(each, matcher, looks)) is not None), None)

    @property
    def _num_before(self) -> int:
        return self.text.containers[-1].num_before if self.text.containers else 0


def _drop(bits: np.ndarray, tokens: Iterable[int]) -> None:
    if dropped := list(tokens):
        bits &= ~bits_of(dropped, len(bits))


def _rests(values: Collection[Any], written: bytes) -> list[bytes]:
    """What is missing of the texts among the values that begin with `written`."""
    return [value[len(written) :] for value in values if isinstance(value, bytes) and value.startswith(written)]


def _begins_one(values: Collection[Any], written: bytes) -> bool:
    return bool(_rests(values, written) or _rests(_texts_of_integers(values), written))


def _texts_of_integers(values: Iterable[Any]) -> list[bytes]:
    integers = [value for value in values if isinstance(value, int)]
    return [b"%d" % value for value in integers] + ([b"-0"] if 0 in integers else [])


def _number(written: bytes) -> float | str:
    """The number as clients read it: an integer, or a double."""
    try:
        if len(written) > _MAX_DIGITS:
            return written.decode()
        if written.lstrip(b"-").isdigit():
            return int(written)
        value = float(written)
    except ValueError:  # not yet a number
        return f"part {written.decode()}"
    return int(value) if value.is_integer() else value


def _content(written: bytes) -> bytes:
    """The text of a string, UTF-8, from how JSON writes it."""
    if b"\\" not in written:
        return written
    return _ESCAPES.sub(_unescaped, written)


def _unescaped(escapes: re.Match[bytes]) -> bytes:
    try:
        text: str = json.loads(b'"' + escapes[0] + b'"')
    except ValueError:
        return escapes[0]
    return text.encode(errors="surrogatepass")


def _is_partial(written: bytes, content: bytes) -> bool:
    """Whether the string's end may become part of an escape, or of a character of two escapes."""
    return b"\\" in written and _PART_OF_ESCAPE.search(content) is not None
