"""Turns a stream of token ids into a stream of text, and finds stop strings in the text.

Decides which text is final. Knows nothing of requests, sampling or HTTP. Both classes cost O(1) amortised per token, and
their output does not depend on how the stream is divided into pushes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from llama_core.errors import InvalidParameter
from llama_core.text.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # one for each byte that is not part of a valid UTF-8 character


class IncrementalDetokenizer:
    """Everything that `push` returned, plus `flush` at the end, is `tokenizer.decode` of all ids, character for character.

    Bytes are held back while they may be the start of a character: at most 3 bytes. `prefix` are ids whose text the
    reader already has: the text continues after them, so its leading space is kept. Without `skip_special_tokens`, the
    text has the names of control tokens. shown: control tokens whose names it has in any case.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prefix: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown = shown
        self._by_byte = tokenizer.byte_decoding != "byte_level"
        self._control_ends_character = tokenizer.byte_decoding == "sentencepiece"
        self._held = b""  # the start of a valid UTF-8 character
        self._drops_space = tokenizer.leading_space != "keep"  # until the text begins
        self.push(prefix)

    def push(self, ids: Sequence[int]) -> str:
        """Text that no later id can change. Raises InvalidParameter for an id outside [0, vocab_size), and then takes none."""
        for token_id in ids:
            self._tokenizer.token_bytes(token_id)
        return "".join([self.push_one(token_id) for token_id in ids])

    def push_one(self, token_id: int) -> str:
        """`push` of a single id: a stream calls this for every token."""
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            return self._take_control(token_id)
        if self._drops_space and not self._held:
            raw = self._without_space(token_id, raw)
        return self._take(raw)

    def flush(self) -> str:
        """The rest, after the last id: U+FFFD for the bytes held back."""
        held, self._held = self._held, b""
        if held:
            self._drops_space = False
        return REPLACEMENT * (len(held) if self._by_byte else min(len(held), 1))

    def _take_control(self, token_id: int) -> str:
        is_shown = not self._skips_special or token_id in self._shown
        name = self._tokenizer.control_text(token_id) if is_shown else ""
        ended = self.flush() if self._control_ends_character else ""
        return ended + self._take(name.encode()) if name else ended

    def _without_space(self, token_id: int, raw: bytes) -> bytes:
        """The bytes of the first token with text."""
        rule = self._tokenizer.leading_space
        if rule == "drop_first_token":
            self._drops_space = False
            return raw.replace(b" ", b"") if self._tokenizer.leads_with_space(token_id) else raw
        if self._tokenizer.leads_with_space(token_id):
            self._drops_space = rule == "drop_all"
            return raw[1:]
        return raw

    def _take(self, raw: bytes) -> str:
        """The text that `raw` completes: whole characters, and U+FFFD for bytes that are not part of any."""
        held, text = self._held + raw, ""
        while held:
            try:
                text, held = text + held.decode(), b""
            except UnicodeDecodeError as error:
                text, held = text + held[: error.start].decode(), held[error.start :]
                if error.reason == "unexpected end of data":
                    break
                # SentencePiece skips one byte and tries again; others skip the whole beginning of a character.
                text, held = text + REPLACEMENT, held[1 if self._by_byte else error.end - error.start :]
        self._held = held
        if text:
            self._drops_space = False
        return text


class StopCheck(NamedTuple):
    """`emit`: text for the reader. `stopped`: a stop string followed or ended it, and no more text will."""

    emit: str
    stopped: bool


class StopChecker:
    """Passes text through up to the first stop string, and removes that string unless the text is to include it.

    Holds back the end of the text while it may be a prefix of a stop string. The stop string that is complete first
    wins; of several that end together, the longest. So the result does not depend on how the text is divided into pushes.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """Raises InvalidParameter for an empty stop string, or one that is not a string."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidParameter("stop must be a list of strings of at least 1 character", param="stop")
        self._includes_stop = includes_stop
        self.matched: str | None = None  # the stop string that ended the text
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""  # always a prefix of a stop string

    def push(self, text: str, *, may_stop: bool = True) -> StopCheck:
        """Takes more text. After a stop, every push is ignored and returns ("", True). A stop string that is complete in a text
        that may not stop is passed through."""
        if self.matched is not None:
            return StopCheck("", True)
        if not self._patterns:
            return StopCheck(text, False)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for pattern in self._patterns:  # longest first
                if pattern.advance(char) and may_stop:
                    self.matched, self._held = pattern.stop, ""
                    return StopCheck(seen[: end if self._includes_stop else end - len(pattern.stop)], True)
        num_held = max(pattern.num_matched for pattern in self._patterns)
        certain = len(seen) - num_held
        self._held = seen[certain:]
        return StopCheck(seen[:certain], False)

    def flush(self) -> str:
        """The text still held back, once the generation has ended without a stop string."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.num_matched = 0
        return held


class _Pattern:
    """Knuth-Morris-Pratt search for one stop string, a character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # length of the longest prefix of `stop` that the text ends with
        self._border = [0] * len(stop)  # [i]: the longest proper border of stop[: i + 1]
        for i in range(1, len(stop)):
            self._border[i] = self._extend(self._border[i - 1], stop[i])

    def advance(self, char: str) -> bool:
        """Takes one character. True if it completes the stop string."""
        self.num_matched = self._extend(self.num_matched, char)
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._border[-1]
        return True

    def _extend(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._border[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)
