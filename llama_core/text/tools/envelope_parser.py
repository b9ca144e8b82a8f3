"""Parses calls written as {"name": ..., "arguments": {...}}: one, several, or a list of them, after an opening text."""

from collections.abc import Collection

from llama_core.text.tools.json_scan import SPACES, CallHead, Miss, behind, read_head, read_literal, skip_spaces
from llama_core.text.tools.parser import CallParser, trigger_at


class EnvelopeParser(CallParser):
    """opening: begins the calls, at any place of the text. closing: ends them; "" if only the answer's end does."""

    def __init__(self, names: Collection[str], opening: str, *, closing: str = "", separators: str = ",") -> None:
        super().__init__(names)
        self._opening_text, self._closing, self._separators = opening, closing, separators

    def _find(self, text: str) -> int:
        return trigger_at(text, self._opening_text)

    def _opening(self, text: str, at: int) -> CallHead:
        _, at = read_literal(text, at, self._opening_text)
        at = skip_spaces(text, at)
        return read_head(text, at + 1 if text[at] == "[" else at, self._names)

    def _next(self, text: str) -> CallHead | int:
        """Behind the arguments: the object's brace, then a separator, the end of a list, or the closing text."""
        at = skip_spaces(text, behind(text, 0, "}"))
        if text[at] in self._separators:
            return read_head(text, at + 1, self._names)
        if text[at] == "]":
            if not self._closing:
                return at + 1
            at = skip_spaces(text, at + 1)
        if not self._closing:
            raise Miss
        return read_literal(text, at, self._closing)[1]

    def _is_formal(self, rest: str) -> bool:
        return self._closing.startswith(rest.strip(SPACES + "}]"))
