"""How a step samples, in torch, which defines the results of `kernels.TritonSampler` and never waits for the host.

Both read what the slots have on the device, and both can be part of a CUDA graph.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch

from llama_core.backends.backend import NOT_FINITE, NOTHING_ALLOWED
from llama_core.backends.fused.step_plan import SampleTensors
from llama_core.backends.logit_rules import (
    FIRST_ALLOWED,
    FIRST_BAD_WORD,
    FIRST_ENTRY,
    MAX_ENTRIES,
    WORD_WIDTH,
)
from llama_core.backends.sampling import logprobs_of, sample
from llama_core.backends.sampling_tensors import SamplingTensors
from llama_core.scheduling.request import TokenLogprob
from llama_core.scheduling.sampling_params import MAX_BAD_WORDS, MAX_TOP_LOGPROBS

# What the rows of a step need: the most likely tokens, random sampling, also rules of their slots, also masks of grammars.
Mode = Literal["greedy", "sampled", "ruled", "masked"]

_LOW: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What samplers read: tensors on the device that keep their addresses. tokens: int64 [slots, max_seq_len]. sampling: of all
    slots. rules: int64 [slots, `logit_rules.table_words`]. mask_indices: int64 [max_samples], of rows of `masks` int64
    [max_samples, `logit_rules.bit_words`], -1 for samples without a mask."""

    tokens: torch.Tensor
    sampling: SamplingTensors
    rules: torch.Tensor
    mask_indices: torch.Tensor
    masks: torch.Tensor


def unpacked(logprobs: torch.Tensor) -> list[TokenLogprob]:
    """The log-probabilities in a host copy of the result of `TorchSampler.logprobs`."""
    words = logprobs.numpy()
    values, tokens = (words >> 32).astype(np.int32).view(np.float32).tolist(), (words & _LOW).tolist()
    rows = zip(values, tokens, strict=True)
    return [TokenLogprob(value[0], tuple(zip(token[1:], value[1:], strict=True))) for value, token in rows]


class TorchSampler:
    """Samples B rows of logits, float32 [B, vocab], which stay as they are. No row's result depends on the others. Sorts every
    row.

    nbytes: of the memory that is kept between steps.
    """

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    @property
    def nbytes(self) -> int:
        return 0

    def sample(self, logits: torch.Tensor, samples: SampleTensors, mode: Mode) -> torch.Tensor:
        """int64 [B]: tokens, NOT_FINITE or NOTHING_ALLOWED."""
        finite = logits.isfinite().all(-1)
        usable = torch.where(finite[:, None], logits, 0.0)
        if mode == "greedy":
            return torch.where(finite, usable.argmax(-1), NOT_FINITE)
        if mode != "sampled":
            usable = self._edited(usable, samples, has_masks=mode == "masked")
        allowed = usable.amax(-1) > -math.inf
        usable = torch.where(allowed[:, None], usable, 0.0)
        tokens = sample(usable, self._state.sampling.at(samples.slots), samples.positions)
        return tokens.where(allowed, NOTHING_ALLOWED).where(finite, NOT_FINITE)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, 1 + n], n = min(MAX_TOP_LOGPROBS, vocab): of the rows' `tokens`, int64 [B], and of the n most likely ones.
        Each is a token and, in the upper half, the bits of its log-probability, float32, before any rule."""
        tokens = tokens.clamp(min=0)
        chosen, values, ids = logprobs_of(logits, tokens, MAX_TOP_LOGPROBS)
        values, ids = torch.cat([chosen[:, None], values], 1), torch.cat([tokens[:, None], ids], 1)
        return (values.view(torch.int32).long() << 32) | ids

    def _edited(self, logits: torch.Tensor, samples: SampleTensors, *, has_masks: bool) -> torch.Tensor:
        state, vocab = self._state, logits.shape[-1]
        rules, tokens = state.rules[samples.slots], state.tokens[samples.slots]
        if has_masks:
            index = state.mask_indices[: len(logits)]
            is_allowed = _bits(state.masks[index.clamp(min=0)], vocab) | (index < 0)[:, None]
            logits = logits.masked_fill(~is_allowed, -math.inf)
        is_allowed = _bits(rules[:, FIRST_ALLOWED:], vocab) | (rules[:, 2:3] >> 32 == 0)
        logits = logits.masked_fill(~is_allowed, -math.inf) + _added(rules, samples.positions, vocab)
        prompt_lengths = rules[:, :1] & _LOW
        logits = _penalized(logits, tokens, prompt_lengths, samples.positions, state.sampling.at(samples.slots))
        return logits.masked_fill(_banned(rules, tokens, prompt_lengths, samples.positions, vocab), -math.inf)


def _bits(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [B, vocab] from int64 words [B, N]."""
    index = torch.arange(vocab, device=words.device)
    return (words[:, index // 64] >> (index % 64) & 1) > 0


def _added(rules: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 [B, vocab]: biases, and -inf for delayed tokens and bad words of one token."""
    entries = rules[:, FIRST_ENTRY : FIRST_ENTRY + MAX_ENTRIES]
    index = torch.arange(MAX_ENTRIES, device=rules.device)
    counts, delayed = rules[:, 1:2] & _LOW, rules[:, 1:2] >> 32
    is_early = positions[:, None] < rules[:, :1] >> 32
    values = (entries >> 32).int().view(torch.float32)
    values = values.masked_fill(is_early & (index < delayed), -math.inf)
    # Entries of no token are beyond the vocabulary.
    tokens = torch.where(index < counts, entries & _LOW, vocab)
    return torch.zeros((len(rules), vocab + 1), device=rules.device).scatter(1, tokens, values)[:, :vocab]


def _penalized(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    prompt_lengths: torch.Tensor,
    positions: torch.Tensor,
    sampling: SamplingTensors,
) -> torch.Tensor:
    place, vocab = torch.arange(tokens.shape[1], device=tokens.device), logits.shape[-1]
    is_known = place < positions[:, None]
    is_generated = (is_known & (place >= prompt_lengths)).long()
    none = torch.zeros((len(logits), vocab), dtype=torch.int64, device=logits.device)
    counts = none.scatter_add(1, tokens, is_generated)
    is_seen = none.scatter_add(1, tokens, is_known.long()) > 0
    repetition = torch.where(is_seen, sampling.repetition_penalty[:, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - sampling.frequency_penalty[:, None] * counts.float()
    return logits - torch.where(counts > 0, sampling.presence_penalty[:, None], 0.0)


def _banned(
    rules: torch.Tensor, tokens: torch.Tensor, prompt_lengths: torch.Tensor, positions: torch.Tensor, vocab: int
) -> torch.Tensor:
    """bool [B, vocab]: the last tokens of bad words whose other tokens were generated last."""
    words = rules[:, FIRST_BAD_WORD:FIRST_ALLOWED].contiguous().view(torch.int32).view(-1, MAX_BAD_WORDS, WORD_WIDTH)
    place = positions[:, None] + torch.arange(1 - WORD_WIDTH, 0, device=rules.device)
    known = tokens.gather(1, place.clamp(min=0)).where(place >= prompt_lengths, -2)
    begins = words[..., :-1]
    follows = ((begins < 0) | (begins == known[:, None])).all(-1)
    is_word = torch.arange(MAX_BAD_WORDS, device=rules.device) < rules[:, 2:3] & _LOW
    last = torch.where(follows & is_word, words[..., -1].long(), vocab)
    none = torch.zeros((len(rules), vocab + 1), dtype=torch.bool, device=rules.device)
    return none.scatter(1, last, torch.ones_like(last, dtype=torch.bool))[:, :vocab]
