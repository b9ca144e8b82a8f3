"""A string that knows which of its characters the chat template wrote itself.

Control tokens are looked for in these characters only. The mark is on the template's text and not on the contents: an
operation that this class does not know gives an unmarked string, which can lose a control token of the template but never
make one of a message's text.
"""

import operator
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Self, SupportsIndex, cast

# Half-open intervals of the template's own characters: sorted, disjoint, not adjacent, not empty.
Spans = tuple[tuple[int, int], ...]
_CONVERSION: Final = re.compile(r"%(?:\((\w+)\))?([^a-zA-Z%]*[a-zA-Z%])")


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
        inside = ((max(b, begin) - begin, min(e, end) - begin) for b, e in self.own if b < end and e > begin)
        return MarkedText(str.__getitem__(self, slice(begin, end)), tuple(inside))

    # Operators

    def __add__(self, other: object) -> "MarkedText":
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> "MarkedText":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "MarkedText":
        return concat((self,) * operator.index(count))

    __rmul__ = __mul__

    def __mod__(self, values: object) -> "MarkedText":
        rest = iter(values if isinstance(values, tuple) else (values,))
        pieces, at = [], 0
        for match in _CONVERSION.finditer(self):
            pieces.append(self.cut(at, match.start()))
            at = match.end()
            if match[2] == "%":
                pieces.append(self.cut(at - 1, at))
                continue
            value = next(rest) if match[1] is None else cast(Mapping[str, object], values)[match[1]]
            pieces.append(str(value) if match[2] == "s" else f"%{match[2]}" % (value,))  # type: ignore[arg-type]
        return concat([*pieces, self.cut(at, len(self))])

    def __getitem__(self, key: SupportsIndex | slice) -> "MarkedText":
        if isinstance(key, slice):
            begin, end, stride = key.indices(len(self))
            return self.cut(begin, max(begin, end)) if stride == 1 else MarkedText(str.__getitem__(self, key))
        at = operator.index(key)  # TypeError for a name, as with str
        str.__getitem__(self, at)  # raises IndexError
        return self.cut(at % len(self), at % len(self) + 1)

    def __iter__(self) -> Iterator[str]:
        return (self.cut(i, i + 1) for i in range(len(self))) if self.own else map(MarkedText, str.__iter__(self))

    # Methods that cut

    def strip(self, chars: str | None = None) -> "MarkedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "MarkedText":
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> "MarkedText":
        return self.cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> "MarkedText":
        return self.cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "MarkedText":
        return self.cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(str.partition(self, sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(str.rpartition(self, sep))

    def _parted(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self.cut(0, first), self.cut(first, second), self.cut(second, len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, at = [], 0
        for whole, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            lines.append(self.cut(at, at + len(line)))
            at += len(whole)
        return cast(list[str], lines)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Parts of this text in their order, with their marks. Between parts lies `sep`, or white space."""
        found, at = [], 0
        for part in parts:
            begin = at if sep is not None else str.index(self, part, at)
            found.append(self.cut(begin, begin + len(part)))
            at = begin + len(part) + len(sep or "")
        return cast(list[str], found)

    # Methods that put together

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "MarkedText":
        if not old or not (self.own or getattr(new, "own", ())):
            return MarkedText(str.replace(self, old, new, count))
        return concat((new,)).join(self.split(old, count))

    def join(self, parts: Iterable[str]) -> "MarkedText":
        items = list(parts)
        spread: list[str] = [self] * (2 * len(items) - 1) if items else []
        spread[::2] = items
        return concat(spread)

    def format(self, *values: object, **named: object) -> "MarkedText":
        """Fields are numbers and names: no attributes. The text of a format that is whole keeps its mark."""
        pieces: list[str] = []
        number = 0
        for literal, field, spec, conversion in string.Formatter().parse(self.plain()):
            pieces.append(MarkedText.written(literal) if self._is_own() else literal)
            if field is None:
                continue
            if conversion or not re.fullmatch(r"\w*", field):
                raise ValueError("this format field is not supported in a chat template")
            if field == "":
                field, number = str(number), number + 1
            value = values[int(field)] if field.isdecimal() else named[field]
            pieces.append(format(value, spec) if spec else str(value))
        return concat(pieces)

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
        changed = change(self.plain())
        return MarkedText.written(changed) if self._is_own() else MarkedText(changed)

    def _is_own(self) -> bool:
        return self.own == ((0, len(self)),)


def concat(parts: Iterable[str]) -> MarkedText:
    """The parts as one text. Marks that touch become one."""
    pieces = list(parts)
    own: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        for begin, end in getattr(piece, "own", ()):
            if own and own[-1][1] == at + begin:
                own[-1] = (own[-1][0], at + end)
            else:
                own.append((at + begin, at + end))
        at += len(piece)
    return MarkedText("".join(pieces), tuple(own))


def mark_contents(value: Any) -> Any:
    """JSON data of a request as a template gets it: new lists and dicts, and every string a MarkedText without marks, unless
    the server wrote it as one."""
    if isinstance(value, str):
        return value if isinstance(value, MarkedText) else MarkedText(value)
    if isinstance(value, Mapping):
        return {MarkedText(key): mark_contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_contents(item) for item in value]
    return value
