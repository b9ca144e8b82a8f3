"""Divides an answer into text and tool calls, as it arrives.

A call counts once its head, up to the beginning of its arguments, is complete and names one of the tools: text that does not
become a call stays text. White space around calls belongs to none. For formats whose calls are the whole answer, a call is
looked for at the beginning of the answer only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Protocol

from llama_core.text.tools.json_scan import (
    SPACES,
    CallHead,
    Miss,
    ObjectEnd,
    TooShort,
    behind,
    read_head,
    read_literal,
    skip_spaces,
)
from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece


class AnswerParser(Protocol):
    """Reads one answer. The joined pieces do not depend on how its text is divided."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that no later text can change."""

    def finish(self) -> list[Piece]:
        """The rest, at the end of the answer."""


class CallParser(ABC):
    """The parts that formats share: the text before a call, its arguments as a JSON object, the end. A format gives the rest.

    `_opening` is tried at each possible place of the text, `_next` after a call; both raise Miss.
    """

    def __init__(self, names: Collection[str]) -> None:
        """names: of the tools that may be called."""
        self._names = names
        self._buffer = ""
        self._ended = False
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._object = ObjectEnd()
        self._state: Callable[[], bool] = self._text

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        self._ended = True
        pieces = self.push("")
        rest, self._buffer = self._buffer, ""
        if rest and not (self._num_calls and self._is_formal(rest)):
            pieces.append(Content(rest))
        return pieces

    # What a format decides.

    @abstractmethod
    def _find(self, text: str) -> int:
        """Where a call may begin in `text`, white space before it excluded; the length of `text` if nowhere."""

    @abstractmethod
    def _opening(self, text: str, at: int) -> CallHead:
        """The head of the first call, which may begin at `at`."""

    @abstractmethod
    def _next(self, text: str) -> CallHead | int:
        """Behind a call: the next call's head, or the length of what ends the calls."""

    def _is_formal(self, rest: str) -> bool:
        """Whether the answer's last characters belong to the calls' form: white space, or part of an ending."""
        return not rest.strip(SPACES)

    # States: each takes from the buffer, and says whether to go on.

    def _text(self) -> bool:
        at = self._find(self._buffer)
        held = len(self._buffer[:at].rstrip(SPACES))  # white space before a call is not part of the text
        if at == len(self._buffer):
            return self._take_text(held)
        try:
            head = self._opening(self._buffer, at)
        except Miss as miss:
            if self._ended or not isinstance(miss, TooShort):
                return self._take_text(at + 1)
            self._take_text(held)
            return False
        self._take_text(held)
        self._buffer = self._buffer[at - held :]
        self._begin(head._replace(end=head.end - at))
        return True

    def _arguments(self) -> bool:
        end = self._object.find(self._buffer)
        length = len(self._buffer) if end is None else end
        self._pieces.append(Arguments(self._buffer[:length]))
        self._buffer = self._buffer[length:]
        if end is not None:
            self._state = self._behind
        return True

    def _behind(self) -> bool:
        try:
            after = self._next(self._buffer)
        except Miss as miss:
            if isinstance(miss, TooShort) and (not self._ended or self._is_formal(self._buffer)):
                return False
            after = 0
        if isinstance(after, CallHead):
            self._begin(after)
        else:
            self._buffer = self._buffer[after:]
            self._state = self._text
        return True

    def _begin(self, head: CallHead) -> None:
        self._num_calls += 1
        self._pieces.append(CallStart(head.name))
        self._buffer = self._buffer[head.end :]
        if head.arguments is not None:
            self._pieces.append(Arguments(head.arguments))
            self._state = self._behind
        else:
            self._object = ObjectEnd()
            self._state = self._arguments

    def _take_text(self, length: int) -> bool:
        if length:
            self._pieces.append(Content(self._buffer[:length]))
            self._buffer = self._buffer[length:]
        return bool(length)


def trigger_at(text: str, trigger: str) -> int:
    """Where `trigger`, or a prefix of it that ends the text, begins; the length of `text` if nowhere."""
    found = text.find(trigger)
    if found >= 0:
        return found
    for at in range(max(0, len(text) - len(trigger) + 1), len(text)):
        if trigger.startswith(text[at:]):
            return at
    return len(text)


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


class EnvelopeParser(CallParser):
    """openings: each begins the calls, at any place of the text. closing: ends them; "" if only the answer's end does."""

    def __init__(self, names: Collection[str], *openings: str, closing: str = "", separators: str = ",") -> None:
        super().__init__(names)
        self._openings, self._closing, self._separators = openings, closing, separators

    def _find(self, text: str) -> int:
        return min(trigger_at(text, each) for each in self._openings)

    def _opening(self, text: str, at: int) -> CallHead:
        _, at = read_literal(text, at, *self._openings)
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
