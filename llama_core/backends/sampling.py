"""From logits to tokens: the same token for the same (logits, request seed, position), whatever else is in the batch.

A sample uses one uniform number, hashed from (seed, position), and the inverse of the nucleus's cumulative distribution.
Tokens are ordered by probability, then by id, so the order of equal probabilities is defined too.
"""

import torch

from llama_core.backends.sampling_tensors import SamplingTensors
from llama_core.scheduling.request import TokenLogprob

# Dividing by a lower temperature could leave float32's range; only one token would have a probability.
GREEDY_BELOW = 1e-5


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [B] in [0, 1), one for each (seed, position), both int64 [B].

    Two rounds of splitmix64's finaliser (Steele, Lea and Flood 2014), the position added between them; the top 53 bits.
    """
    mixed = _splitmix64(_splitmix64(seeds) + positions)
    return _shift_right(mixed, 11).double() * 2.0**-53


def sample(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
    """One token a row: int64 [B] from float32 logits [B, vocab], for positions int64 [B]. No shape or branch depends on a
    value, so that a CUDA graph could capture it.

    The nucleus is the reference's: tokens in descending probability, as long as the mass before them does not exceed top_p.
    With top_k, the mass is that of the k most likely.
    """
    probs = (logits / sampling.temperature.clamp(min=GREEDY_BELOW)[:, None]).softmax(-1)
    probs = torch.where(probs < sampling.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0, probs)
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    picked = _invert(ordered, sampling, uniform(sampling.seed, positions))
    sampled = ids.gather(-1, picked[:, None]).squeeze(-1)
    return torch.where(sampling.temperature >= GREEDY_BELOW, sampled, logits.argmax(-1))


def logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural log of the raw softmax at `tokens` [B], and the num_top most likely: values [B, num_top], ids [B, num_top]."""
    ids = most_likely(logits, min(num_top, logits.shape[-1]))
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), logprobs.gather(-1, ids), ids


def most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [B, count] of the greatest logits, the greatest first; of equal ones the lower id first, and rather than others."""
    if not count:
        return logits.new_empty((len(logits), 0), dtype=torch.int64)
    values, ids = logits.topk(count, dim=-1)
    # `topk` takes any of the tokens that equal the last value.
    least, vocab = values[:, -1:], logits.shape[-1]
    from_end = torch.arange(vocab, 0, -1, dtype=torch.int32, device=logits.device)
    lowest = vocab - torch.where(logits == least, from_end, 0).topk(count, dim=-1).values.long()
    ties = values == least
    ids = torch.where(ties, lowest.gather(-1, (ties.cumsum(-1) - 1).clamp(min=0)), ids).sort(dim=-1).values
    return ids.gather(-1, logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices)


def _invert(ordered: torch.Tensor, sampling: SamplingTensors, numbers: torch.Tensor) -> torch.Tensor:
    """Index [B] into descending probabilities [B, N] at which the nucleus's cumulative distribution passes the number."""
    top_p, top_k = sampling.top_p, sampling.top_k
    index = torch.arange(ordered.shape[-1], device=ordered.device)
    limited = (top_k > 0)[:, None]
    kept = ~limited | (index < top_k[:, None])
    ordered = ordered * kept
    limited |= (sampling.min_p > 0)[:, None]
    total = torch.where(limited, ordered.sum(-1, keepdim=True), torch.ones_like(ordered[:, :1]))
    cumulative = ordered.cumsum(-1)
    nucleus = kept & (cumulative - ordered <= top_p[:, None] * total)
    size = nucleus.sum(-1, keepdim=True).clamp(min=1)
    cumulative = cumulative.double()
    mass = cumulative.gather(-1, size - 1)
    picked = torch.searchsorted(cumulative, numbers[:, None] * mass, right=True)
    return torch.minimum(picked, size - 1).squeeze(-1)


def _splitmix64(z: torch.Tensor) -> torch.Tensor:
    # int64 arithmetic wraps around as uint64 does. Only the shifts must be made logical.
    z = z + -0x61C8864680B583EB
    z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def token_logprobs(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprob]:
    """The logprobs of `tokens`, one for each row of logits [B, V], each with the num_top most likely tokens of its row."""
    chosen, values, ids = logprobs_of(logits, torch.tensor(tokens, device=logits.device), max(num_top))
    rows = zip(chosen.tolist(), values.tolist(), ids.tolist(), num_top, strict=True)
    return [TokenLogprob(logprob, tuple(zip(top_ids[:n], top[:n], strict=True))) for logprob, top, top_ids, n in rows]
