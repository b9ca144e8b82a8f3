"""Sampling follows the reference's nucleus, in distribution and to the token."""

import pytest
import scipy.stats
import torch

from llama_core.backends.sampling import sample, token_logprobs, uniform
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.full_runs import with_full_ones
from tests.support.sampling_cases import sampling_rows


def draw(
    logits: torch.Tensor, n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 5
) -> torch.Tensor:
    """n samples from one row of logits, at positions 0 .. n."""
    return sample(
        logits.expand(n, -1), sampling_rows(SamplingParams(temperature, top_p, top_k, seed), n), torch.arange(n)
    )


def reference_nucleus(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Meta's rule, from its description: sort descending, drop each token whose predecessors' mass exceeds p, renormalise."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ordered[(ordered.cumsum(-1) - ordered) > p] = 0.0
    return torch.zeros_like(probs).scatter(-1, ids, ordered / ordered.sum())


ROWS = [(1.0, 1.0), (0.6, 0.9), (1.5, 0.95), (0.3, 0.05)]
SIZES = [12, 200, 3000]
IN_EACH_RUN = [(12, 1.0, 1.0), (200, 0.6, 0.9), (200, 0.3, 0.05), (3000, 1.5, 0.95)]


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_p"), with_full_ones([(vocab, *row) for row in ROWS for vocab in SIZES], IN_EACH_RUN)
)
def test_samples_follow_the_reference_nucleus(vocab: int, temperature: float, top_p: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    expected = reference_nucleus((logits / temperature).softmax(-1), top_p)
    n = 20_000 if vocab < 1000 else 4_000
    counts = torch.bincount(draw(logits, n, temperature, top_p), minlength=vocab)
    assert not counts[expected == 0].any(), "a token outside the nucleus was sampled"
    # Pearson's chi-square over the tokens that are expected often enough, the rest in one class.
    often = expected * n >= 5
    observed = [*counts[often].tolist(), int(counts[~often].sum())]
    wanted = [*(expected[often] * n).tolist(), float((expected[~often] * n).sum())]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) == 1:
        assert observed == [n]
        return
    scale = n / sum(wanted)
    assert scipy.stats.chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4


@pytest.mark.parametrize("vocab", [30, 3000, 70_000])
def test_of_equally_likely_tokens_those_with_the_lower_ids_are_reported_in_any_batch(vocab: int) -> None:
    logits = torch.randn((5, vocab), generator=torch.Generator().manual_seed(vocab)).mul(8).round() / 8
    logits[1] = 0.5
    logits[2, 7:] = -0.0
    counts = [20, 0, 5, 20, 1]
    found = token_logprobs(logits, [3] * 5, counts)
    for i, row in enumerate(found):
        order = logits[i].add(0.0).sort(dim=-1, descending=True, stable=True).indices[: counts[i]].tolist()
        assert [token for token, _ in row.top] == order
        assert token_logprobs(logits[i : i + 1], [3], [counts[i]]) == [row]


def test_numbers_are_uniform_and_independent_of_neighbouring_seeds_and_positions() -> None:
    for seeds, positions in (
        (torch.zeros(50_000, dtype=torch.int64), torch.arange(50_000)),
        (torch.arange(50_000), torch.full((50_000,), 9)),
    ):
        u = uniform(seeds, positions)
        assert u.min() >= 0 and u.max() < 1 and len(u.unique()) == len(u)
        assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
        assert abs(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]) < 0.02
