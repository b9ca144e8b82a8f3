"""Reasoning of R1-Distill and Qwen3: text between <think> and </think> at the beginning of an answer.

Decides which text is reasoning, and how many tokens are. Knows nothing of tools or HTTP.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from llama_core.text.tokenizers.tokenizer import Tokenizer

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
_SPACES: Final = " \t\r\n"
_LAST_TOKENS: Final = 16  # of a prompt: enough to spell OPEN and the white space after it


def reasons(template: str | None, has_token: Callable[[str], bool]) -> bool:
    """Whether a model's template or its vocabulary has the marks."""
    return (template is not None and CLOSE in template) or (has_token(OPEN) and has_token(CLOSE))


def prompt_begins_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends with the opening mark, as some templates begin the assistant's message."""
    end = tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip(_SPACES).endswith(OPEN)


class Split(NamedTuple):
    """Parts of an answer's text: reasoning, then the answer proper."""

    reasoning: str
    answer: str


class ReasoningSplitter:
    """Separates the reasoning from the answer, without marks and white space around them. Joined parts do not depend on how the
    text is divided. begun: the prompt has the opening mark."""

    def __init__(self, *, begun: bool) -> None:
        self._buffer = ""
        self._state = self._reasoning if begun else self._beginning
        self._has_text = False

    def push(self, text: str) -> Split:
        self._buffer += text
        return self._state()

    def finish(self) -> Split:
        """The rest, at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._reasoning:
            return Split(rest.rstrip(_SPACES), "")
        return Split("", "" if self._state == self._between else rest)

    # States: each takes what is certain from the buffer.

    def _beginning(self) -> Split:
        begin = self._buffer.lstrip(_SPACES)
        if begin.startswith(OPEN):
            self._buffer = begin[len(OPEN) :]
            self._state = self._reasoning
            return self._state()
        if OPEN.startswith(begin):  # or nothing but white space so far
            return Split("", "")
        self._state = self._answer
        return self._state()

    def _reasoning(self) -> Split:
        if not self._has_text:
            self._buffer = self._buffer.lstrip(_SPACES)
        before, closed, behind = self._buffer.partition(CLOSE)
        if closed:
            self._buffer, self._state = behind, self._between
            return Split(before.rstrip(_SPACES), self._state().answer)
        num_held = next(n for n in range(len(CLOSE) - 1, -1, -1) if before.endswith(CLOSE[:n]))
        text = before[: len(before) - num_held].rstrip(_SPACES)
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


class ReasoningCounter:
    """Counts the tokens of the reasoning with its marks, exactly, whatever the stream's division."""

    def __init__(self, tokenizer: Tokenizer, *, begun: bool) -> None:
        self._tokenizer = tokenizer
        self._state: str = "reasoning" if begun else "beginning"
        self._text = b""
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """So far; 0 while it is not certain that the answer reasons."""
        return 0 if self._state == "beginning" else self._num_tokens

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._state == "answer":
                return
            self._take(token)

    def _take(self, token: int) -> None:
        raw = self._tokenizer.token_bytes(token) or self._tokenizer.control_text(token).encode()
        self._text += raw
        self._num_tokens += 1
        opening, closing = OPEN.encode(), CLOSE.encode()
        if self._state == "beginning":
            begin = self._text.lstrip()
            if begin.startswith(opening):
                self._state = "reasoning"
            elif not opening.startswith(begin):
                self._state, self._num_tokens = "answer", 0
        if self._state == "reasoning":
            if closing in self._text:
                self._state = "answer"
            self._text = self._text[-2 * len(closing) - len(raw) :]
