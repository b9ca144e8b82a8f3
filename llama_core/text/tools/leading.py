"""For formats whose calls are the whole answer: a call is looked for at the beginning of the answer only."""

from abc import abstractmethod

from llama_core.text.tools.json_scan import SPACES, CallHead, TooShort
from llama_core.text.tools.parser import AnswerParser, CallParser
from llama_core.text.tools.pieces import Content, Piece


class LeadingCalls(CallParser):
    """A format gives `_leading` instead of `_opening`. Any other beginning makes the whole answer text."""

    _is_decided = False

    def _find(self, text: str) -> int:
        return len(text) if self._is_decided else len(text) - len(text.lstrip(SPACES))

    def _opening(self, text: str, at: int) -> CallHead:
        self._is_decided = True
        try:
            return self._leading(text, at)
        except TooShort:
            self._is_decided = self._ended
            raise

    @abstractmethod
    def _leading(self, text: str, at: int) -> CallHead:
        """The head of the call with which the answer begins, at its first character that is no white space."""


class LeadingParser:
    """An `AnswerParser` for an answer that is either calls or another text: its first character says which. The text may have
    what looks like a call."""

    def __init__(self, parser: AnswerParser, opening: str) -> None:
        """opening: the character with which calls begin, if not with a mark in angle brackets."""
        self._parser, self._openings = parser, (opening, "<")
        self._has_calls: bool | None = None  # None: not known yet
        self._spaces = ""  # what came before it was known

    def push(self, text: str) -> list[Piece]:
        if self._has_calls is None:
            text = self._spaces = self._spaces + text
            if not (begun := text.lstrip(SPACES)):
                return []
            self._has_calls, self._spaces = begun.startswith(self._openings), ""
        return self._parser.push(text) if self._has_calls else [Content(text)]

    def finish(self) -> list[Piece]:
        return [Content(self._spaces)] if self._spaces else self._parser.finish()
