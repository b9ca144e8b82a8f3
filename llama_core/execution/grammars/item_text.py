"""The state of a JSON text that is being written, with the items so far of lists whose items must be distinct.

Strings, numbers and words are compared as JSON schema does: 1 equals 1.0, "a" equals "\\u0061", and 1 does not equal true.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

_MAX_DIGITS: Final = 4000  # of a number that is compared by its value; Python refuses integers of 4300

_QUOTE, _COMMA = b'",'
IN_NUMBER: Final = frozenset(b"0123456789+-.eE")
_BEGINS_NUMBER: Final = frozenset(b"0123456789-")
_WORDS: Final = {ord("t"): "true", ord("f"): "false", ord("n"): "null"}

_PLAIN: Final = re.compile(rb'[^"\\]*')
_ESCAPES: Final = re.compile(rb"(?:\\u[0-9a-fA-F]{4})+|\\[^u]")

_Places = tuple[int, ...]  # states of `UniqueLists`: several where the schema has alternatives


class UniqueLists:
    """An automaton that finds a schema's lists with distinct items. Its steps are the names and indices on the way from the
    whole value to a part of it. places: the states of the whole value. Several states at once follow alternatives of the
    schema."""

    def __init__(self, written: Mapping[str, Any]) -> None:
        """written: as `text.schema_forms.unique_lists` writes them. Raises LookupError or TypeError for anything else."""
        self.places: _Places = tuple(written["root"])
        self._states: Sequence[Mapping[str, Any]] = written["states"]
        self._found: dict[tuple[_Places, bytes | int], _Places] = {}

    def item(self, places: _Places, index: int) -> _Places:
        """The states of an item. places: those of the list."""
        if not places:
            return ()
        longest = max(len(self._states[place].get("first", ())) for place in places)
        return self._behind(places, min(index, longest))

    def property(self, places: _Places, name: bytes) -> _Places:
        """The states of a property. places: those of the object. name: UTF-8."""
        return self._behind(places, name) if places else ()

    def are_distinct(self, places: _Places) -> bool:
        return any(self._states[place].get("is_unique") for place in places)

    def may_run_out(self, places: _Places) -> int:
        """Whether an item that was begun may be unable to differ from all earlier ones. 0: it can always differ. AT_ITS_END: it
        can until its text equals an earlier one's. More: the schema may allow few values."""
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


class Container(NamedTuple):
    """An object or a list that is open.

    places: its own states. is_distinct: its items must be distinct; then `earlier` has its complete items. num_before: items
    before the one that comes next or was begun. ways: cache of `unique_items`, by what is written of an item: a text with which
    it can continue and that begins no earlier item; None where there are many such texts.
    """

    is_list: bool
    places: _Places
    is_distinct: bool
    ways: dict[tuple[int, bytes], bytes | None]
    earlier: frozenset[bytes | float | str] = frozenset()
    num_before: int = 0


# What the text is within, or what comes next.
VALUE, KEY, STRING, NUMBER, COMPLETE = range(5)


@dataclass(slots=True)
class ItemText:
    """The state of a JSON text.

    places: the states of the value that comes next or was begun. within: VALUE, KEY, STRING, NUMBER or COMPLETE. written: what
    is written so far of a string or a number. is_kept: whether `written` is followed, because the value is compared or is a
    name that leads to lists."""

    lists: UniqueLists
    places: _Places
    containers: list[Container] = field(default_factory=list)
    within: int = VALUE
    written: bytes = b""
    is_kept: bool = False
    is_name: bool = False
    is_escaped: bool = False

    def copy(self) -> "ItemText":
        how = self.written, self.is_kept, self.is_name, self.is_escaped
        # `replace` takes three times as long.
        return ItemText(self.lists, self.places, list(self.containers), self.within, *how)

    @property
    def list_of_item(self) -> Container | None:
        """The innermost open container if it is a list of distinct items, else None. The text writes an item, or stands between
        two."""
        if not self.containers or (self.within == STRING and self.is_name):
            return None
        last = self.containers[-1]
        return last if last.is_distinct else None

    def append(self, text: bytes) -> bool:
        """Follow more of the text. Returns whether all items that it completes are distinct."""
        at, is_distinct = 0, True
        while at < len(text):
            if self.within == STRING:
                at = self._append_in_string(text, at)
                if self.within == COMPLETE:
                    is_distinct &= self._complete(content_of(self.written) if self.is_kept else b"")
                continue
            char = text[at]
            at += 1
            if self.within == NUMBER:
                if char in IN_NUMBER:
                    self.written += text[at - 1 : at] if self.is_kept else b""
                    continue
                self.within = COMPLETE
                is_distinct &= not self.is_kept or self._complete(number_of(self.written))
            if self.within == VALUE:
                is_distinct &= self._begin_value(char)
            elif char == _QUOTE:
                self._begin(STRING, is_name=True)
            elif char in b"]}":
                self._close()
            elif char == _COMMA and self.containers:
                self._go_on()
        return is_distinct

    def _append_in_string(self, text: bytes, at: int) -> int:
        """Follow `text` from index `at` within a string. Returns the index behind the string's end, or behind the text's."""
        while at < len(text):
            if self.is_escaped:
                end, self.is_escaped = at + 1, False
            else:
                found = _PLAIN.match(text, at)
                assert found is not None
                end = found.end()
                if end < len(text) and text[end] == _QUOTE:
                    self.written += text[at:end] if self.is_kept else b""
                    self.within = COMPLETE
                    if self.is_name:
                        name = content_of(self.written) if self.is_kept else b""
                        self.places = self.lists.property(self.containers[-1].places, name) if self.is_kept else ()
                        self.within = VALUE
                    return end + 1
                if end < len(text):
                    end, self.is_escaped = end + 1, True
            self.written += text[at:end] if self.is_kept else b""
            at = end
        return at

    def _begin_value(self, char: int) -> bool:
        if char == _QUOTE:
            self._begin(STRING)
        elif char in _BEGINS_NUMBER:
            self._begin(NUMBER)
            self.written = bytes([char])
        elif char in b"[{":
            is_list = char == ord("[")
            is_distinct = is_list and self.lists.are_distinct(self.places)
            self.containers.append(Container(is_list, self.places, is_distinct, {}))
            self.within = VALUE if is_list else KEY
            self.places = self.lists.item(self.places, 0) if is_list else ()
        elif char in b"]}":
            self._close()
        elif char in _WORDS:
            self.within = COMPLETE
            return self._complete(_WORDS[char])
        return True

    def _begin(self, within: int, *, is_name: bool = False) -> None:
        last = self.containers[-1] if self.containers else None
        self.within, self.is_name, self.written, self.is_escaped = within, is_name, b"", False
        self.is_kept = last is not None and (bool(last.places) if is_name else last.is_distinct)

    def _close(self) -> None:
        if self.containers:
            self.containers.pop()
        self.within = COMPLETE

    def _go_on(self) -> None:
        last = self.containers[-1]
        self.within, self.places = KEY, ()
        if last.is_list:
            num_before = last.num_before + 1
            self.containers[-1] = last._replace(num_before=num_before)
            self.within, self.places = VALUE, self.lists.item(last.places, num_before)

    def _complete(self, value: bytes | float | str) -> bool:
        last = self.containers[-1] if self.containers else None
        if last is None or not last.is_distinct:
            return True
        if value in last.earlier:
            return False
        self.containers[-1] = last._replace(earlier=last.earlier | {value})
        return True


def number_of(written: bytes) -> float | str:
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


def content_of(written: bytes) -> bytes:
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
