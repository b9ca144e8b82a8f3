"""A string that knows which of its characters the chat template wrote itself.

Control tokens are looked for in these characters only. The mark is on the template's text and not on the contents: an
operation that this class does not know gives an unmarked string, which can lose a control token of the template but never
make one of a message's text.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Self, SupportsIndex, cast

from llama_core.text.template.budget import MAX_WEIGHT, TemplateTooExpensive, produce, search, step
from llama_core.text.template.formatting import braces_format

# Half-open intervals of the template's own characters: sorted, disjoint, not adjacent, not empty.
Spans = tuple[tuple[int, int], ...]
_MAX_REPEATED_SPANS: Final = 4096
_LINE_ENDS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class MarkedText(str):
    """A str with `own`. Equal to, and hashed as, the plain string."""

    __slots__ = ("own",)
    own: Spans

    def __new__(cls, text: str, own: Spans = ()) -> Self:
        made = super().__new__(cls, text)
        made.own = own
        return made

    @classmethod
    def written(cls, text: str) -> Self:
        """Text of the template itself."""
        return cls(text, ((0, len(text)),) if text else ())

    def __str__(self) -> str:
        return self

    def plain(self) -> str:
        return str.__str__(self)

    def cut(self, begin: int, end: int) -> "MarkedText":
        """The characters from `begin` to `end`, both within the text."""
        produce(max(end - begin, 0))
        step(len(self.own) // 16)
        inside = ((max(b, begin) - begin, min(e, end) - begin) for b, e in self.own if b < end and e > begin)
        return MarkedText(str.__getitem__(self, slice(begin, end)), tuple(inside))

    # Operators

    def __add__(self, other: object) -> "MarkedText":
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> "MarkedText":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "MarkedText":
        count = max(int(count), 0)
        produce(len(self) * count)
        if len(self.own) * count > _MAX_REPEATED_SPANS:
            return MarkedText(str.__mul__(self, count))
        return concat((self,) * count)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> "MarkedText":
        if isinstance(key, slice):
            begin, end, stride = key.indices(len(self))
            if stride == 1:
                return self.cut(begin, max(begin, end))
            produce(len(range(begin, end, stride)))
            return MarkedText(str.__getitem__(self, key))
        at = operator.index(key)  # TypeError for a name, as with str
        str.__getitem__(self, at)  # raises IndexError
        return self.cut(at % len(self), at % len(self) + 1)

    def __iter__(self) -> Iterator[str]:
        return (self.cut(i, i + 1) for i in range(len(self))) if self.own else map(MarkedText, str.__iter__(self))

    # Methods that cut

    def strip(self, chars: str | None = None) -> "MarkedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "MarkedText":
        search(len(self), len(chars or ""))
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> "MarkedText":
        search(len(self), len(chars or ""))
        return self.cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> "MarkedText":
        return self.cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "MarkedText":
        return self.cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(str.partition(self, sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        self._search_backwards(sep)
        return self._parted(str.rpartition(self, sep))

    def _parted(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self.cut(0, first), self.cut(first, second), self.cut(second, len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, _max_splits(maxsplit)), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        self._search_backwards(sep or " ")
        return self._located(str.rsplit(self, sep, _max_splits(maxsplit)), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        _check_parts(sum(str.count(self, end) for end in _LINE_ENDS))
        lines, at = [], 0
        for whole, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            lines.append(self.cut(at, at + len(line)))
            at += len(whole)
        return cast(list[str], lines)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Parts of this text in their order, with their marks. Between parts lies `sep`, or white space."""
        _check_parts(len(parts))
        step(len(parts))
        if not self.own:
            return [MarkedText(part) for part in parts]
        found, at = [], 0
        for part in parts:
            begin = at if sep is not None else str.index(self, part, at)
            found.append(self.cut(begin, begin + len(part)))
            at = begin + len(part) + len(sep or "")
        return cast(list[str], found)

    # Methods that search backwards: Python compares the whole `sub` at each place

    def rfind(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /) -> int:
        self._search_backwards(sub)
        return str.rfind(self, sub, start, end)

    def rindex(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /) -> int:
        self._search_backwards(sub)
        return str.rindex(self, sub, start, end)

    def _search_backwards(self, sub: str) -> None:
        search(len(self) - len(sub) + 1, len(sub))

    # Methods that put together

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "MarkedText":
        limit = int(count)
        step(1 + len(self) // 256)
        num_found = min(str.count(self, old), limit) if limit >= 0 else str.count(self, old)
        produce(max(len(self) + num_found * (len(new) - len(old)), 0))
        if not (self.own or getattr(new, "own", ())):
            return MarkedText(str.replace(self, old, new, limit))
        if not old:
            return MarkedText(str.replace(self, old, new, limit))
        pieces: list[str] = []
        at = 0
        for _ in range(num_found):
            found = str.index(self, old, at)
            pieces += [self.cut(at, found), new]
            at = found + len(old)
        return concat([*pieces, self.cut(at, len(self))])

    def join(self, parts: Iterable[str]) -> "MarkedText":
        items = list(parts)
        step(len(items))
        spread = [self] * (2 * len(items) - 1) if items else []
        spread[::2] = items  # type: ignore[assignment]
        return concat(spread)

    def format(self, *values: object, **named: object) -> "MarkedText":
        whole = bool(self.own) and self.own == ((0, len(self)),)
        pieces = braces_format(self.plain(), values, named)
        return concat([MarkedText.written(p.text) if whole and p.is_literal else p.text for p in pieces])

    # Methods that change letters

    def lower(self) -> "MarkedText":
        return self._changed(str.lower)

    def upper(self) -> "MarkedText":
        return self._changed(str.upper)

    def title(self) -> "MarkedText":
        return self._changed(str.title)

    def capitalize(self) -> "MarkedText":
        return self._changed(str.capitalize)

    def _changed(self, change: Callable[[str], str]) -> "MarkedText":
        produce(3 * len(self))
        changed = change(self.plain())
        return MarkedText.written(changed) if self.own == ((0, len(self)),) else MarkedText(changed)


# The methods of strings that a template may use. Each is bounded by the sizes of its text, arguments and result.
TEXT_METHODS: Final = frozenset(
    {
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit"),
        *("splitlines", "replace", "join", "format", "lower", "upper", "title", "capitalize"),
        *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
        *("isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal", "istitle"),
    }
)


def _max_splits(maxsplit: SupportsIndex) -> int:
    asked = operator.index(maxsplit)
    return min(asked, MAX_WEIGHT) if asked >= 0 else MAX_WEIGHT


def _check_parts(num_parts: int) -> None:
    if num_parts > MAX_WEIGHT:
        raise TemplateTooExpensive("it splits a text into too many parts")


def concat(parts: Iterable[str]) -> MarkedText:
    """The parts as one text. Marks that touch become one."""
    pieces = list(parts)
    step(len(pieces) // 4)
    own: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        for begin, end in getattr(piece, "own", ()):
            if own and own[-1][1] == at + begin:
                own[-1] = (own[-1][0], at + end)
            else:
                own.append((at + begin, at + end))
        at += len(piece)
    produce(at)
    step(len(own) // 16)
    return MarkedText("".join(pieces), tuple(own))


def mark_contents(value: Any) -> Any:
    """JSON data of a request as a template gets it: new lists and dicts, and every string a MarkedText without marks."""
    if isinstance(value, str):
        return MarkedText(value)
    if isinstance(value, Mapping):
        return {MarkedText(key): mark_contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_contents(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON")
