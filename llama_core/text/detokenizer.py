"""Turns a stream of token ids into a stream of text, and finds stop strings in it.

Decides which text is certain. Knows nothing of requests, sampling or HTTP. Both classes cost O(1) amortised per token
and give the same text however the stream is cut into pushes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from llama_core.errors import InvalidParameter
from llama_core.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # one for each byte that is not part of a valid UTF-8 character


class IncrementalDetokenizer:
    """All that `push` returned, and `flush` at the end, is `tokenizer.decode` of all ids, character for character.

    A byte token is held back while it may be the beginning of a character: at most 3 bytes. `prefix` are ids whose
    text the reader already has: what follows is continued from there, so its leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, prefix: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._num_ids = tokenizer.n_words
        self._held = b""  # the beginning of a valid UTF-8 character
        self._drops_space = tokenizer.leading_space != "keep"  # until the text begins
        self.push(prefix)

    def push(self, ids: Sequence[int]) -> str:
        """Text that no later id can change. Raises InvalidParameter for an id outside [0, n_words), taking none."""
        for token_id in ids:
            self._check(token_id)
        return "".join([self.push_one(token_id) for token_id in ids])

    def push_one(self, token_id: int) -> str:
        """`push` of a single id; of all that a stream does for a token, this is what it always does."""
        self._check(token_id)
        text, byte, leads_with_space = self._tokenizer.pieces[token_id]
        if byte is not None:
            return self._take_byte(byte)
        if self._held:
            return self.flush() + text  # the character is broken off here
        if self._drops_space:
            if leads_with_space:
                text = text[1:]
                self._drops_space = self._tokenizer.leading_space == "drop_all"
            self._begun(text)
        return text

    def flush(self) -> str:
        """The rest, after the last id: one U+FFFD for each byte held back."""
        num_bytes, self._held = len(self._held), b""
        return self._begun(REPLACEMENT * num_bytes)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._num_ids:
            raise InvalidParameter(f"a token id must be an integer from 0 to {self._num_ids - 1}", param="tokens")

    def _take_byte(self, byte: int) -> str:
        """What one more byte makes certain: nothing, a whole character, or that the bytes before it are none."""
        held, text = self._held + bytes([byte]), ""
        while held:
            try:
                text, held = text + held.decode(), b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text, held = text + REPLACEMENT, held[1:]  # as SentencePiece: one byte, then try again
        self._held = held
        return self._begun(text)

    def _begun(self, text: str) -> str:
        if text:
            self._drops_space = False
        return text


class StopCheck(NamedTuple):
    """`emit` may go to the reader; `stopped` means that a stop string followed it and nothing else will."""

    emit: str
    stopped: bool


class StopChecker:
    """Passes text through up to the first stop string, which it swallows.

    Holds back an end of the text that may be the beginning of a stop string. The stop string that is complete first
    wins, the longest of those that end together: so the answer does not depend on how the text was cut into pushes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidParameter for an empty stop string, or one that is not a string."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidParameter("stop must be a list of strings of at least 1 character", param="stop")
        self.matched: str | None = None  # the stop string that ended the text
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""  # always the beginning of a stop string

    def push(self, text: str) -> StopCheck:
        """Takes more text. After a stop every push is swallowed and answers ("", True)."""
        if self.matched is not None:
            return StopCheck("", True)
        if not self._patterns:
            return StopCheck(text, False)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for pattern in self._patterns:  # longest first
                if pattern.advance(char):
                    self.matched, self._held = pattern.stop, ""
                    return StopCheck(seen[: end - len(pattern.stop)], True)
        num_held = max(pattern.num_matched for pattern in self._patterns)
        certain = len(seen) - num_held
        self._held = seen[certain:]
        return StopCheck(seen[:certain], False)

    def flush(self) -> str:
        """The text still held back, when the generation ended without a stop string."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.num_matched = 0
        return held


class _Pattern:
    """Knuth-Morris-Pratt search for one stop string, a character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # length of the longest beginning of `stop` that the text ends with
        self._border = [0] * len(stop)  # [i]: the longest proper border of stop[: i + 1]
        for i in range(1, len(stop)):
            self._border[i] = self._extend(self._border[i - 1], stop[i])

    def advance(self, char: str) -> bool:
        """Takes one character; True when it completes the stop string, after which no more may come."""
        self.num_matched = self._extend(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _extend(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._border[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)
