"""The rules of slots in the form that kernels read: one row of int64 words a slot.

A row has three words of two int32 each (prompt length and first end; entries and delayed ones among them; bad words, and
whether there is a list of allowed tokens), then the entries, the bad words and the bits of the allowed tokens. An entry is a
token and, in the upper half, the bits of a float32 that is added to its logit: -inf for a bad word of one token. The first
entries, those of delayed tokens, are banned before the first end. A bad word is WORD_WIDTH int32, right-aligned, -1 before it.
"""

import math
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np

from llama_core.execution.fused.step_plan import Ints
from llama_core.execution.logit_rules import LogitRules
from llama_core.scheduling.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
)

HEADER_WORDS: Final = 3
WORD_WIDTH: Final = MAX_BAD_WORD_TOKENS
# `delayed` has the model's own ends too, which are fewer.
MAX_ENTRIES: Final = MAX_LOGIT_BIASES + MAX_BAD_WORDS + 2 * MAX_STOP_TOKENS
FIRST_ENTRY: Final = HEADER_WORDS
FIRST_BAD_WORD: Final = FIRST_ENTRY + MAX_ENTRIES
FIRST_ALLOWED: Final = FIRST_BAD_WORD + MAX_BAD_WORDS * WORD_WIDTH // 2
NO_RULES: Final = np.zeros(HEADER_WORDS, dtype=np.int64)


def table_words(vocab_size: int) -> int:
    """Words of a row."""
    return FIRST_ALLOWED + bit_words(vocab_size)


def bit_words(vocab_size: int) -> int:
    """Words of a bit for each token."""
    return -(-vocab_size // 64)


def as_words(bits: np.ndarray) -> Ints:
    """uint32 [N] as int64 [ceil(N / 2)]."""
    padded = np.zeros(-(-len(bits) // 2) * 2, dtype=np.uint32)
    padded[: len(bits)] = bits
    return padded.view(np.int64)


def parts_of(rules: LogitRules) -> list[tuple[int, Ints]]:
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
