"""Changes of one slot's logits before the temperature: tokens that are not allowed, biases and penalties.

The order is vLLM's: allowed tokens, bad words, tokens delayed by min_tokens, biases, and penalties.
The native backend reads the same rules as a C struct (`native/logit_rules.hpp`), the others as a table (`rule_table.py`).
"""

import ctypes
from collections.abc import Sequence as Seq

import numpy as np

from llama_core.scheduling.step import SlotInit


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
