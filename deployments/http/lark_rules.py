"""Rules of llguidance's Lark, made from the end of an answer to its beginning: each part of it knows what follows.

The matcher divides an answer into the longest words that the grammar allows, so neighbouring texts and patterns become one
terminal, a regular expression, and free text is the part of one that lacks what may end it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which the answer goes on. head: a regular expression, as parts of a terminal. begins: the text with which it
    begins, where that is known. tail: the items of a rule that follow it; "" where the answer ends."""

    head: tuple[str, ...] = ()
    begins: str = ""
    tail: str = ""


Paths = tuple[Path, ...]


class LarkRules:
    """The lines of a grammar beside `start`, and the grammars that it refers to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.others: list[dict[str, Any]] = []  # grammars of their own
        self._num_names = 0
        self._terminals: dict[str, str] = {}  # body -> name

    def source(self, start: Paths) -> str:
        """The whole grammar as llguidance reads it."""
        lark = "\n".join([f"start: {self.alternatives(start)}", *self.lines])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.others]})

    def alternatives(self, paths: Paths) -> str:
        """The body of a rule."""
        return " | ".join(self._items(path) or '""' for path in paths)

    def _items(self, path: Path) -> str:
        head = "" if not path.head else path.head[0] if len(path.head) == 1 else self.terminal(" ".join(path.head))
        return f"{head} {path.tail}".strip()

    def follow(self, after: Paths) -> str:
        """What follows, as items of a rule."""
        return self._items(after[0]) if len(after) == 1 else self.rule(self.alternatives(after)).tail

    def new_name(self, prefix: str) -> str:
        """Not defined yet."""
        self._num_names += 1
        return f"{prefix}{self._num_names}"

    def define(self, name: str, body: str, place: str = "") -> None:
        """place: of a part that an error may be about."""
        self.lines += [f"// {place}"] if place else []
        self.lines.append(f"{name}: {body}")

    def rule(self, body: str) -> Path:
        """A rule of its own, to the end of the answer."""
        name = self.new_name("r")
        self.define(name, body)
        return Path(tail=name)

    def terminal(self, body: str) -> str:
        """The name of a terminal, one for each body."""
        if (name := self._terminals.get(body)) is None:
            name = self._terminals[body] = self.new_name("T")
            self.define(name, body)
        return name

    def text(self, excluded: Iterable[str], max_chars: int | None = None) -> str:
        """Free text without any of these."""
        free = self.terminal("/(?s:.*)/")
        limited = free if max_chars is None else self.terminal(f"/(?s:.{{0,{max_chars}}})/")
        texts = " | ".join(_quoted(text) for text in dict.fromkeys(excluded))
        return self.terminal(f"{limited} & ~({free} ({texts}) {free})") if texts else limited


def expression(paths: Paths) -> str:
    """Paths without a tail as one regular expression."""
    return " | ".join(dict.fromkeys(" ".join(path.head) or '""' for path in paths))


def literal(text: str, after: Paths) -> Paths:
    """`text` in front of each path."""
    return before(_quoted(text), text, after) if text else after


def before(item: str, begins: str, after: Paths) -> Paths:
    """`item`, a part of a terminal, in front of each path."""
    return tuple(replace(path, head=(item, *path.head), begins=begins) for path in after)


def _quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
