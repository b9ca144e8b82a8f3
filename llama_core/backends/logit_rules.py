"""Changes of one slot's logits before the temperature: tokens that are not allowed, biases and penalties.

The order is vLLM's: allowed tokens, bad words, tokens delayed by min_tokens, biases, and penalties.
The native backend reads the same rules as a C struct (`native/logit_rules.hpp`). The other backends read a table on the device,
with one row of int64 words a slot: three words of two int32 each (prompt length and first end; entries and delayed ones among
them; bad words, and whether there is a list of allowed tokens), then the entries, the bad words and the bits of the allowed
tokens. An entry is a token and, in the upper half, the bits of a float32 that is added to its logit: -inf for a bad word of one
token. The first entries, those of delayed tokens, are banned before the first end. A bad word is WORD_WIDTH int32,
right-aligned, -1 before it.
"""

import ctypes
import math
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np

from llama_core.scheduling.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
)
from llama_core.scheduling.step import SlotInit

HEADER_WORDS: Final = 3
WORD_WIDTH: Final = MAX_BAD_WORD_TOKENS
# `delayed` has the model's own ends too, which are fewer.
MAX_ENTRIES: Final = MAX_LOGIT_BIASES + MAX_BAD_WORDS + 2 * MAX_STOP_TOKENS
FIRST_ENTRY: Final = HEADER_WORDS
FIRST_BAD_WORD: Final = FIRST_ENTRY + MAX_ENTRIES
FIRST_ALLOWED: Final = FIRST_BAD_WORD + MAX_BAD_WORDS * WORD_WIDTH // 2
NO_RULES: Final = np.zeros(HEADER_WORDS, dtype=np.int64)


class LogitRulesStruct(ctypes.Structure):
    """`LogitRules` in C++."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("prompt_length", "first_end", "num_biases", "num_delayed", "num_bad_words")
        ),
        *((name, ctypes.c_void_p) for name in ("bias_tokens", "biases", "delayed", "bad_words", "allowed")),
    )


class LogitRules:
    """The rules of one slot, from its `SlotInit`. Ids beyond the vocabulary are left out: they have no logit.

    first_end: no token of `delayed` is sampled before this position. biases: of tokens, added up where the request names one
    twice. allowed: `token_bits` of the only tokens that are sampled; None for all.
    """

    def __init__(self, init: SlotInit, vocab_size: int) -> None:
        params = init.params
        self.prompt_length = len(init.tokens) if init.prompt_length is None else init.prompt_length
        self.first_end = self.prompt_length + params.min_tokens
        self.biases: dict[int, float] = {}
        for token, bias in params.logit_bias:
            if 0 <= token < vocab_size:
                self.biases[token] = self.biases.get(token, 0.0) + bias
        self.delayed = [token for token in init.delayed if 0 <= token < vocab_size] if params.min_tokens else []
        self.bad_words = [word for word in params.bad_words if all(0 <= token < vocab_size for token in word)]
        allowed = [*params.allowed_token_ids, *init.delayed] if params.allowed_token_ids else []
        bits = token_bits([token for token in allowed if 0 <= token < vocab_size], vocab_size)
        self.allowed = bits if params.allowed_token_ids else None
        # What the C struct points to.
        self._bias_tokens = np.array(list(self.biases), dtype=np.int32)
        self._biases = np.array(list(self.biases.values()), dtype=np.float32)
        self._delayed = np.array(self.delayed, dtype=np.int32)
        self._bad_words = np.array([n for word in self.bad_words for n in (len(word), *word)], dtype=np.int32)
        self.struct = LogitRulesStruct(
            self.prompt_length,
            self.first_end,
            len(self.biases),
            len(self.delayed),
            len(self.bad_words),
            self._bias_tokens.ctypes.data,
            self._biases.ctypes.data,
            self._delayed.ctypes.data,
            self._bad_words.ctypes.data,
            None if self.allowed is None else self.allowed.ctypes.data,
        )

    @property
    def address(self) -> int:
        """The address of the C struct, valid as long as this object lives."""
        return ctypes.addressof(self.struct)


def token_bits(tokens: Seq[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 is set for each token i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def table_words(vocab_size: int) -> int:
    """Words of a row."""
    return FIRST_ALLOWED + bit_words(vocab_size)


def bit_words(vocab_size: int) -> int:
    """Words of a bit for each token."""
    return -(-vocab_size // 64)


def as_words(bits: np.ndarray) -> np.ndarray:
    """uint32 [N] as int64 [ceil(N / 2)]."""
    padded = np.zeros(-(-len(bits) // 2) * 2, dtype=np.uint32)
    padded[: len(bits)] = bits
    return padded.view(np.int64)


def parts_of(rules: LogitRules) -> list[tuple[int, np.ndarray]]:
    """The parts of a slot's row that its rules need: (first word, words). What lies elsewhere is not read."""
    added = dict(rules.biases)
    long_words = []
    for word in rules.bad_words:
        if len(word) == 1:
            added[word[0]] = -math.inf
        else:
            long_words.append(word)
    # Delayed tokens come first.
    added = {token: added.get(token, 0.0) for token in dict.fromkeys([*rules.delayed, *added])}
    assert len(added) <= MAX_ENTRIES, "the wire bounds each list of tokens"
    entries = np.empty((len(added), 2), dtype=np.int32)
    entries[:, 0] = list(added)
    entries[:, 1] = np.array(list(added.values()), dtype=np.float32).view(np.int32)
    has_allowed = rules.allowed is not None
    counts = [rules.prompt_length, rules.first_end, len(added), len(set(rules.delayed)), len(long_words), has_allowed]
    parts = [(0, np.array(counts, dtype=np.int32).view(np.int64))]
    if len(added):
        parts.append((FIRST_ENTRY, entries.view(np.int64).ravel()))
    if long_words:
        parts.append((FIRST_BAD_WORD, _aligned(long_words).view(np.int64).ravel()))
    if rules.allowed is not None:
        parts.append((FIRST_ALLOWED, as_words(rules.allowed)))
    return parts


def _aligned(words: Seq[Seq[int]]) -> np.ndarray:
    aligned = np.full((len(words), WORD_WIDTH), -1, dtype=np.int32)
    for row, word in zip(aligned, words, strict=True):
        row[WORD_WIDTH - len(word) :] = word
    return aligned
