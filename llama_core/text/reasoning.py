"""Reasoning of a model: text between two marks at the beginning of an answer, or in messages of its own.

Decides which text is reasoning, and how many tokens are. Knows nothing of tools or HTTP.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from llama_core.text.tokenizers.tokenizer import Tokenizer

_SPACES: Final = " \t\r\n"
_LAST_TOKENS: Final = 16  # of a prompt: enough to spell an opening mark and the white space after it


class Marks(NamedTuple):
    """What surrounds the reasoning. The others belong to answers in messages: `further` begins each message after the first,
    `answer` opens the answer, `aside` a text before a call."""

    open: str
    close: str
    further: str = ""
    answer: str = ""
    aside: str = ""

    @property
    def tokens(self) -> frozenset[str]:
        """The tokens of which the marks consist."""
        return frozenset(_TOKEN.findall(" ".join(self)))


_TOKEN: Final = re.compile(r"<[^<>]+>|\[[^][]+\]")
_MESSAGE: Final = "<|message|>"
KINDS: Final = (
    Marks("<think>", "</think>"),  # R1-Distill and Qwen3
    Marks("[THINK]", "[/THINK]"),  # Magistral and Ministral 3
    Marks(  # harmony, of gpt-oss
        f"<|channel|>analysis{_MESSAGE}",
        "<|end|>",
        "<|start|>assistant",
        f"<|channel|>final{_MESSAGE}",
        f"<|channel|>commentary{_MESSAGE}",
    ),
)


def find_marks(template: str | None, has_token: Callable[[str], bool]) -> Marks | None:
    """The marks that a model's template has, else its vocabulary; None if it does not reason."""
    for marks in KINDS:
        if template is not None and (marks.answer or marks.close) in template:
            return marks
    return next((marks for marks in KINDS if all(map(has_token, marks.tokens))), None)


def prompt_begins_reasoning(tokenizer: Tokenizer, prompt: Sequence[int], marks: Marks) -> bool:
    """Whether the prompt ends with the opening mark, as some templates begin the assistant's message."""
    end = tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip(_SPACES).endswith(marks.open)


class Split(NamedTuple):
    """Parts of an answer's text: reasoning, then the answer proper."""

    reasoning: str
    answer: str


def _num_held(text: str, *marks: str) -> int:
    """The length of the end of `text` that may begin a mark."""
    return max(next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n])) for mark in marks)


class ReasoningSplitter:
    """Separates the reasoning, with which the answer begins, from the rest, without marks and white space around them. Joined
    parts do not depend on how the text is divided. begun: the prompt has the opening mark."""

    def __init__(self, marks: Marks, *, begun: bool) -> None:
        self._marks = marks
        self._buffer = ""
        self._state = self._reasoning if begun else self._beginning
        self._has_text = False
        self.num_thoughts = int(begun)  # stretches of reasoning that have begun

    @property
    def state(self) -> str:
        """Of the text so far: "open" for what may become a mark, "reasoning", "answer", "over" where no reasoning follows."""
        if self._state == self._beginning:
            return "open"
        return "reasoning" if self._state == self._reasoning else "over"

    def push(self, text: str) -> list[Split]:
        self._buffer += text
        return [self._state()]

    def finish(self) -> Split:
        rest, self._buffer = self._buffer, ""
        if self._state == self._reasoning:
            return Split(rest.rstrip(_SPACES), "")
        return Split("", "" if self._state == self._between else rest)

    # States: each takes what is certain from the buffer.

    def _beginning(self) -> Split:
        begin = self._buffer.lstrip(_SPACES)
        if begin.startswith(self._marks.open):
            self._buffer = begin[len(self._marks.open) :]
            self._state = self._reasoning
            self.num_thoughts = 1
            return self._state()
        if self._marks.open.startswith(begin):  # or nothing but white space so far
            return Split("", "")
        self._state = self._answer
        return self._state()

    def _reasoning(self) -> Split:
        if not self._has_text:
            self._buffer = self._buffer.lstrip(_SPACES)
        before, closed, behind = self._buffer.partition(self._marks.close)
        if closed:
            self._buffer, self._state = behind, self._between
            return Split(before.rstrip(_SPACES), self._state().answer)
        text = before[: len(before) - _num_held(before, self._marks.close)].rstrip(_SPACES)
        self._buffer = before[len(text) :]
        self._has_text = self._has_text or bool(text)
        return Split(text, "")

    def _between(self) -> Split:
        self._buffer = self._buffer.lstrip(_SPACES)
        if not self._buffer:
            return Split("", "")
        self._state = self._answer
        return self._state()

    def _answer(self) -> Split:
        text, self._buffer = self._buffer, ""
        return Split("", text)


_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_END: Final = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT: Final = re.compile(r"\bto=(functions\.[^\s<]+)")
_HEADER_CHARS: Final = 256  # a function's name has up to 128


class MessageSplitter:
    """The same for an answer in messages: analysis is reasoning, every other text the answer. A call's header becomes the one
    form `<|channel|>commentary to=functions.NAME<|message|>`, which a tool format reads."""

    def __init__(self, marks: Marks, *, begun: bool) -> None:
        self._marks = marks
        self._buffer = ""
        self.state = "reasoning" if begun else "open"
        self.num_thoughts = int(begun)
        self._is_fresh = True  # the message has no text yet
        self._has_text: set[str] = set()  # states with text: a line end separates their messages
        self._has_ended = False

    def push(self, text: str) -> list[Split]:
        self._buffer += text
        splits = []
        while (split := self._header() if self.state == "open" else self._body()) is not None:
            splits.append(split)
        return splits

    def finish(self) -> Split:
        rest, self._buffer = self._buffer, ""
        if self.state == "reasoning":
            return Split(rest.rstrip(_SPACES), "")
        begin = rest.lstrip(_SPACES)
        if self.state == "open" and (begin.startswith(("<|channel|>", "<|start|>")) or (self._has_ended and not begin)):
            return Split("", "")  # a header that was cut off
        return Split("", rest)

    # Each takes what is certain from the buffer; None if nothing is.

    def _header(self) -> Split | None:
        begin = self._buffer.lstrip(_SPACES)
        openings = (self._marks.further, "<|channel|>", "to=")
        if any(each.startswith(begin) for each in openings):
            return None
        header, found, behind = begin.partition(_MESSAGE)
        least_chars = len(header) if found else len(begin) - len(_MESSAGE) + 1
        self._is_fresh = True
        if not begin.startswith(openings) or least_chars > _HEADER_CHARS:
            self.state = "answer"  # text without a header
        elif not found:
            return None
        elif recipient := _RECIPIENT.search(header):
            self._buffer, self.state, self._is_fresh = behind, "answer", False
            return Split("", f"{self._marks.aside.removesuffix(_MESSAGE)} to={recipient[1]}{_MESSAGE}")
        else:
            self._buffer = behind
            self.state = "reasoning" if "<|channel|>analysis" in header else "answer"
            self.num_thoughts += self.state == "reasoning"
        return Split("", "")

    def _body(self) -> Split | None:
        is_reasoning = self.state == "reasoning"
        if is_reasoning and self._is_fresh:
            self._buffer = self._buffer.lstrip(_SPACES)
        end = _END.search(self._buffer)
        text = self._buffer[: len(self._buffer) - _num_held(self._buffer, *_ENDS) if end is None else end.start()]
        if is_reasoning:
            text = text.rstrip(_SPACES)
        self._buffer = self._buffer[len(text) if end is None else end.end() :]
        if text and self._is_fresh:
            self._is_fresh = False
            separator = "\n" if self.state in self._has_text else ""
            self._has_text.add(self.state)
            text = separator + text
        if end is not None:
            self.state, self._has_ended = "open", True
        elif not text:
            return None
        return Split(text, "") if is_reasoning else Split("", text)


Splitter = ReasoningSplitter | MessageSplitter


def open_splitter(marks: Marks, *, begun: bool) -> Splitter:
    return MessageSplitter(marks, begun=begun) if marks.further else ReasoningSplitter(marks, begun=begun)


class ReasoningCounter:
    """Counts the tokens of the reasoning with its marks, exactly, whatever the stream's division."""

    def __init__(self, tokenizer: Tokenizer, marks: Marks, *, begun: bool) -> None:
        self._tokenizer = tokenizer
        self._splitter = open_splitter(marks, begun=begun)
        self._num_open = 0  # tokens of what may become a mark
        self.num_tokens = 0  # so far, without those

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._splitter.state == "over":
                return
            self._take(token)

    def _take(self, token: int) -> None:
        raw = self._tokenizer.token_bytes(token) or self._tokenizer.control_text(token).encode()
        before, num_thoughts = self._splitter.state, self._splitter.num_thoughts
        self._splitter.push(raw.decode("latin-1"))  # a token may end within a character
        self._num_open += 1
        if before == "reasoning" or self._splitter.num_thoughts > num_thoughts:
            self.num_tokens += self._num_open
        elif self._splitter.state == "open":
            return
        self._num_open = 0
