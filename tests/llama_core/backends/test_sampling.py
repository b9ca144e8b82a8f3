"""The random numbers of samples, and the tokens that are reported. `test_fused_sampling.py` compares samples with float64."""

import pytest
import scipy.stats
import torch

from llama_core.backends.sampling import token_logprobs, uniform


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
