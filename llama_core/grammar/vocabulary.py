"""A tokenizer's vocabulary as llguidance reads it."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer

# Texts inside a JSON string by length. llguidance decides about all tokens of a slice at once where the grammar allows any text
# of it. Near the end of a string with a maximum length only short slices apply; llguidance's own begin at 10 characters.
_STRING_CHAR: Final = r'[^"\\\x00-\x1F\x7F]'
_SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHAR}{{1,{most}}}" for most in (4, 8, 16, 30)),
    f"{_STRING_CHAR}+",
)
_KEPT_TEXTS: Final = 4096  # grammars force the same texts again and again, and each step asks twice
_LONGEST_KEPT: Final = 256  # bytes
_BEFORE: Final = "\n"  # a text that no tokenizer merges with what follows it


def load_vocabulary(path: str, vocab_size: int, stop_ids: Iterable[int]) -> LLTokenizer:
    """path: of a tokenizer's file. vocab_size: of the model, which may be larger than the tokenizer's."""
    tokenizer = load_tokenizer(Path(path), vocab_size, probes=False)  # the replica has loaded it
    return grammar_vocabulary(tokenizer.padded(vocab_size), stop_ids)


def grammar_vocabulary(tokenizer: Tokenizer, stop_ids: Iterable[int]) -> LLTokenizer:
    """stop_ids: what may follow a complete answer. Takes some tenths of a second for 128,000 tokens."""
    wrapped = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(wrapped, n_vocab=tokenizer.vocab_size, eos_token=sorted(stop_ids), slices=list(_SLICES))


class _Vocabulary:
    """The attributes and the call that `TokenizerWrapper` asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_words)
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = [token for token in ids if tokenizer.is_control(token)]
        self.tokens = [tokenizer.token_bytes(token) or tokenizer.control_text(token).encode() for token in ids]
        self._tokenizer = tokenizer
        self._before = self._encode(_BEFORE)
        self._kept: dict[bytes, tuple[int, ...]] = {}

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids whose bytes are those of `text`, inside a text: without the space that some tokenizers add in front."""
        raw = text.encode() if isinstance(text, str) else text
        if (found := self._kept.get(raw)) is None:
            found = self._ids_of(raw)
            if len(self._kept) >= _KEPT_TEXTS:
                self._kept.clear()
            if len(raw) <= _LONGEST_KEPT:
                self._kept[raw] = found
        return list(found)

    def _ids_of(self, raw: bytes) -> tuple[int, ...]:
        try:
            ids = self._encode(_BEFORE + raw.decode())
        except UnicodeDecodeError:
            return self._longest_matches(raw)
        own = ids[len(self._before) :]
        if ids[: len(self._before)] == self._before and b"".join(self.tokens[token] for token in own) == raw:
            return tuple(own)
        return self._longest_matches(raw)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False, eos=False)

    def _longest_matches(self, raw: bytes) -> tuple[int, ...]:
        """The longest token again and again, for bytes that are no text and tokenizers that rewrite text."""
        found: list[int] = []
        at, longest = 0, self._longest
        while at < len(raw):
            end = next(
                (end for end in range(min(len(raw), at + longest), at, -1) if raw[at:end] in self._ids_of_bytes), 0
            )
            if not end:
                break  # a byte that no token has
            found.append(self._ids_of_bytes[raw[at:end]])
            at = end
        return tuple(found)

    @cached_property
    def _ids_of_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids_of_bytes))
