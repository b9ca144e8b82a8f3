"""Parses calls written as {"name": ..., "arguments": {...}}: one, several, or a list of them, after an opening text."""

from collections.abc import Collection

from llama_core.text.tools.json_scan import NO, SPACES, Miss, read_head, read_literal, skip_spaces
from llama_core.text.tools.parser import CallHead, CallParser, trigger_at


class EnvelopeParser(CallParser):
    """opening: begins the calls, at any place of the text. closing: ends them; "" if only the answer's end does."""

    def __init__(self, names: Collection[str], opening: str, *, closing: str = "", separators: str = ",") -> None:
        super().__init__(names)
        self._opening_text, self._closing, self._separators = opening, closing, separators

    def _find(self, text: str) -> int:
        return trigger_at(text, self._opening_text)

    def _opening(self, text: str, at: int) -> CallHead | Miss:
        opened = read_literal(text, at, self._opening_text)
        if isinstance(opened, Miss):
            return opened
        begin = skip_spaces(text, opened)
        if isinstance(begin, Miss):
            return begin
        return self._head(text, begin + 1 if text[begin] == "[" else begin)

    def _next(self, text: str) -> CallHead | int | Miss:
        """Behind the arguments: the object's brace, then a separator, the end of a list, or the closing text."""
        at = _behind(text, 0, "}")
        if isinstance(at, Miss):
            return at
        if text[at] in self._separators:
            return self._head(text, at + 1)
        if text[at] == "]":
            if not self._closing:
                return at + 1
            at = _behind(text, at, "]")
            if isinstance(at, Miss):
                return at
        return read_literal(text, at, self._closing) if self._closing else NO

    def _head(self, text: str, at: int) -> CallHead | Miss:
        head = read_head(text, at, self._names)
        if isinstance(head, Miss):
            return head
        return CallHead(head.end, head.name, None if head.has_arguments else "{}")

    def _is_formal(self, rest: str) -> bool:
        return self._closing.startswith(rest.strip(SPACES + "}]"))


def _behind(text: str, at: int, char: str) -> int | Miss:
    """The position of the first character after `char` and white space."""
    found = skip_spaces(text, at)
    if isinstance(found, Miss):
        return found
    return skip_spaces(text, found + 1) if text[found] == char else NO
