"""Changes of one slot's logits before the temperature: tokens that are not allowed, biases and penalties.

The order is vLLM's: allowed tokens, bad words, tokens delayed by min_tokens, biases, and penalties.
The native backend reads the same rules as a C struct (`native/logit_rules.hpp`); the others call `LogitRules.apply`.
"""

import ctypes
import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from llama_core.execution.backend import StepMasks
from llama_core.scheduling.sampling_params import SamplingParams
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
        self._params = params
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

    def apply(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Change `logits`, float32 [vocab], for the position behind `tokens`, int64 [position]."""
        position, generated = len(tokens), tokens[self.prompt_length :]
        if self.allowed is not None:
            logits.masked_fill_(~unpack_bits(self.allowed, len(logits)).to(logits.device), -math.inf)
        if self.bad_words:
            latest = generated[-max(map(len, self.bad_words)) :].tolist()
            for word in self.bad_words:
                if ends_with(latest, word[:-1]):
                    logits[word[-1]] = -math.inf
        if position < self.first_end:
            logits[_index(self._delayed, logits)] = -math.inf
        if len(self._biases):
            biases = torch.from_numpy(self._biases).to(logits.device)
            logits.index_add_(0, _index(self._bias_tokens, logits), biases)
        _penalize(logits, tokens, generated, self._params)


def edit_logits(
    logits: torch.Tensor,
    samples: Seq[tuple[int, int]],
    rules: Seq[LogitRules | None],
    tokens: torch.Tensor,
    masks: StepMasks | None,
) -> torch.Tensor:
    """Logits float32 [B, vocab] with the rules and grammars of their slots; the same tensor where none has any.

    samples: slot and position of each row. rules: of each slot. tokens: int64 [slots, max_seq_len].
    """
    masked = masks is not None and any(masks.has_mask)
    if not masked and not any(rules[slot] is not None for slot, _ in samples):
        return logits
    logits = logits.clone()
    if masks is not None and masked:
        masks.wait()
        for i, has_mask in enumerate(masks.has_mask):
            if has_mask:
                logits[i].masked_fill_(~unpack_bits(masks.bits[i], logits.shape[-1]).to(logits.device), -math.inf)
    for i, (slot, position) in enumerate(samples):
        if (rule := rules[slot]) is not None:
            rule.apply(logits[i], tokens[slot, :position])
    return logits


def _penalize(logits: torch.Tensor, tokens: torch.Tensor, generated: torch.Tensor, params: SamplingParams) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        scores = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.frequency_penalty or params.presence_penalty:
        used, counts = torch.unique(generated, return_counts=True)
        logits[used] -= params.frequency_penalty * counts.float()
        logits[used] -= params.presence_penalty


def token_bits(tokens: Seq[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 is set for each token i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def unpack_bits(words: np.ndarray, vocab_size: int) -> torch.Tensor:
    """bool [vocab] on the CPU from `token_bits`."""
    return torch.from_numpy(np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(bool))


def ends_with(tokens: Seq[int], suffix: Seq[int]) -> bool:
    return len(suffix) <= len(tokens) and list(tokens[len(tokens) - len(suffix) :]) == list(suffix)


def _index(tokens: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(tokens).to(logits.device, torch.int64)
