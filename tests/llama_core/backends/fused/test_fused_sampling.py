"""Sampling on GPUs over random rows, beside float64 and the other samplers: in torch, and in Triton's interpreter."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from llama_core.backends.backend import NOT_FINITE, NOTHING_ALLOWED
from llama_core.backends.fused.ops import TorchOps
from llama_core.backends.fused.sampling.sampler import unpacked
from llama_core.backends.sampling import sample
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from llama_core.scheduling.step import SlotInit
from tests.llama_core.backends.fused.sampling_cases import Case, acceptable, random_case
from tests.support.forking import interpret
from tests.support.full_runs import examples

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
CPU = torch.device("cpu")


def tokens_of(ops: TorchOps, case: Case, mode: str, device: torch.device) -> list[int]:
    sampler = ops.sampler(case.state(device), *case.logits.shape)
    return sampler.sample(case.logits.to(device), case.samples(device), mode).tolist()  # type: ignore[arg-type]


def check_samples(ops: TorchOps, device: torch.device, examples: int) -> None:
    """Tokens are those of float64, and those of the reference where rounding cannot matter; the same in any batch."""
    sharp = total = 0
    for case in map(random_case, range(examples)):
        got = tokens_of(ops, case, "sampled", device)
        assert tokens_of(ops, case.reversed(), "sampled", device) == got[::-1]
        reference = sample(
            case.logits, case.state(CPU).sampling.at(case.samples(CPU).slots), case.samples(CPU).positions
        )
        for row, params, position, token, expected in zip(
            case.logits, case.params, case.positions, got, reference.tolist(), strict=True
        ):
            possible = acceptable(row, params, position)
            assert token in possible, (token, possible, params, position)
            if len(possible) == 1 and row.abs().max() < 1e30:
                assert token == expected, (token, expected, params)
                sharp += 1
            total += 1
        assert tokens_of(ops, case, "greedy", device) == case.logits.argmax(-1).tolist()
    assert sharp > total * 0.6


def ruled_cases(examples: int) -> list[Case]:
    return [random_case(seed, has_rules=True, vocabularies=(33, 300, 4097)) for seed in range(examples)]


def check_rules(ops: TorchOps, device: torch.device, examples: int) -> None:
    """Rules and masks as the reference applies them; rows without any beside them."""
    for case in ruled_cases(examples):
        mode = "masked" if any(mask is not None for mask in case.masks) else "ruled"
        got, edited = tokens_of(ops, case, mode, device), case.edited()
        for row, params, position, token in zip(edited, case.params, case.positions, got, strict=True):
            if row.max() == -math.inf:
                assert token == NOTHING_ALLOWED
            else:
                assert token in acceptable(row, params, position), (token, params)
                assert row[token] > -math.inf


def case_of_bad_words() -> Case:
    """Token 7 is banned after 5 where 5 was generated, not where it is the prompt's."""
    case = plain_case(torch.zeros((2, 33)), bad_words=((5, 7),))
    for i, tokens in enumerate(([4, 5], [4, 5, 5])):
        case.inits[i] = replace(case.inits[i], tokens=tokens, prompt_length=2)
    assert (case.edited() == -math.inf).nonzero().tolist() == [[1, 7]]
    return case


def check_edits(device: torch.device, examples: int) -> None:
    """Logits under rules have the reference's bits."""
    from llama_core.backends.fused.sampling import logit_kernels
    from llama_core.backends.fused.sampling.sampling_kernels import SamplingBuffers

    for case in (case_of_bad_words(), *ruled_cases(examples)):
        state, samples = case.state(device), case.samples(device)
        buffers = SamplingBuffers(len(case.logits), case.logits.shape[1], device)
        buffers.probs.fill_(math.nan)
        buffers.listed.fill_(7)
        logits = case.logits.to(device)
        # Small tiles, so that uses of a token and bad words lie in several.
        with patch.multiple(logit_kernels, _TILE=16, _WORDS=2):
            logit_kernels.edit(logits, state, samples, buffers, has_masks=True)
        assert torch.equal(buffers.probs.cpu(), case.edited())


def check_logprobs(ops: TorchOps, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    for vocab in (5, 300, 9000):
        logits = torch.randn((3, vocab), generator=generator) * 4
        logits[1] = logits[1].bfloat16()
        tokens = torch.tensor([vocab - 1, 0, vocab // 2])
        sampler = ops.sampler(plain_case(logits).state(device), 3, vocab)
        found = unpacked(sampler.logprobs(logits.to(device), tokens.to(device)).cpu())
        expected = logits.double().log_softmax(-1)
        for i, row in enumerate(found):
            count = min(MAX_TOP_LOGPROBS, vocab)
            order = np.lexsort((np.arange(vocab), -logits[i].numpy()))[:count].tolist()
            assert [token for token, _ in row.top] == order
            for token, value in ((int(tokens[i]), row.logprob), *row.top):
                assert value == pytest.approx(expected[i, token].item(), abs=4e-6)
            assert all(value == row.logprob for token, value in row.top if token == tokens[i])
        alone = ops.sampler(plain_case(logits[2:]).state(device), 1, vocab)
        assert unpacked(alone.logprobs(logits[2:].to(device), tokens[2:].to(device)).cpu()) == found[2:]


def plain_case(logits: torch.Tensor, **fields: Any) -> Case:
    params = [SamplingParams(**({"seed": 9 + i} | fields)) for i in range(len(logits))]
    inits = [SlotInit(i, [1, 2], [], each) for i, each in enumerate(params)]
    return Case(logits, params, inits, [None] * len(params))


def check_odd_rows(ops: TorchOps, device: torch.device) -> None:
    """Logits that are not finite refuse their own row, and nothing else."""
    logits = torch.randn((5, 5000), generator=torch.Generator().manual_seed(1))
    usual = tokens_of(ops, plain_case(logits), "sampled", device)
    broken = logits.clone()
    broken[1, 4999], broken[2, 0], broken[3, 4500] = math.nan, math.inf, -math.inf
    for mode, expected in (("sampled", usual), ("ruled", usual), ("greedy", logits.argmax(-1).tolist())):
        found = tokens_of(ops, plain_case(broken), mode, device)
        assert found == [expected[0], NOT_FINITE, NOT_FINITE, NOT_FINITE, expected[4]], mode


def check_limits(ops: TorchOps, device: torch.device) -> None:
    """Limits that end exactly at a token, over many random numbers. Zeros of both signs are equal: the first comes first."""
    logits = torch.full((1, 5000), -0.0)
    logits[0, 4990] = 0.0
    assert tokens_of(ops, plain_case(logits), "greedy", device) == [0]
    assert tokens_of(ops, plain_case(logits, top_k=1), "sampled", device) == [0]
    equal, two_bins = [0.0] * 8, [0.0] * 2 + [-0.7] * 4 + [-9.0] * 3
    # Five of eight equal tokens: before the fifth, there is exactly the half.
    known: list[tuple[list[float], dict[str, Any], set[int]]] = [
        (equal, {"top_k": 3}, {0, 1, 2}),
        (equal, {"top_p": 0.5}, {0, 1, 2, 3, 4}),
        (equal, {"top_k": 6, "top_p": 0.2}, {0, 1}),
        (two_bins, {"top_k": 3}, {0, 1, 2}),
        (two_bins, {"top_k": 5, "top_p": 0.8}, {0, 1, 2, 3}),
        (two_bins, {"min_p": 0.4, "top_k": 6}, {0, 1, 2, 3, 4, 5}),
    ]
    for row, fields, support in known:
        case = plain_case(torch.tensor([row] * 16), **({"temperature": 1.0, "top_p": 1.0} | fields))
        samples = case.samples(CPU)
        expected = sample(case.logits, case.state(CPU).sampling.at(samples.slots), samples.positions).tolist()
        assert set(expected) == support
        assert tokens_of(ops, case, "sampled", device) == expected


def check_contradictions(ops: TorchOps, device: torch.device) -> None:
    """A row without an allowed token has none; its neighbours have theirs."""
    logits = torch.randn((3, 5000), generator=torch.Generator().manual_seed(1))
    case, usual = plain_case(logits), tokens_of(ops, plain_case(logits), "sampled", device)
    case.inits[1] = replace(case.inits[1], params=SamplingParams(allowed_token_ids=(4999,), bad_words=((4999,),)))
    assert tokens_of(ops, case, "ruled", device) == [usual[0], NOTHING_ALLOWED, usual[2]]
    case = plain_case(logits)
    case.masks[2] = np.zeros(-(-5000 // 32), dtype=np.uint32)
    assert tokens_of(ops, case, "masked", device) == [*usual[:2], NOTHING_ALLOWED]


def check_large(ops: TorchOps, device: torch.device) -> None:
    """The vocabularies of Llama 3 and Qwen, with a nucleus of thousands of tokens, and with logits that are almost equal."""
    for vocab, fields in ((128_256, {"top_p": 1.0}), (151_936, {"top_p": 0.9, "top_k": 100_000})):
        logits = torch.randn((1, vocab), generator=torch.Generator().manual_seed(vocab))
        for row in (logits, logits * 1e-3):
            case = plain_case(row, temperature=1.0, **fields)
            if "top_k" in fields and row is not logits:
                continue  # too long in the interpreter
            [token] = tokens_of(ops, case, "sampled", device)
            assert token in acceptable(row[0], case.params[0], 2)


@pytest.mark.parametrize("check", [check_samples, check_rules])
def test_torch_samples_what_float64_does_and_what_the_reference_does(
    check: Callable[[TorchOps, torch.device, int], None],
) -> None:
    check(TorchOps(), CPU, examples(60, 150))


@pytest.mark.parametrize("check", [check_logprobs, check_odd_rows, check_contradictions, check_limits])
def test_torch_gives_logprobs_and_refuses_rows(check: Callable[[TorchOps, torch.device], None]) -> None:
    check(TorchOps(), CPU)


INTERPRETED = """
import sys, torch
from llama_core.backends.fused.kernels import TritonOps
from tests.llama_core.backends.fused import test_fused_sampling as checks
ops, cpu = TritonOps(), torch.device("cpu")
{}
"""


@pytest.mark.parametrize(
    "check",
    [
        pytest.param("checks.check_samples(ops, cpu, 6)", id="samples"),
        pytest.param("checks.check_rules(ops, cpu, 6)", id="rules"),
        pytest.param("checks.check_edits(cpu, 40)", id="edits"),
        pytest.param("checks.check_logprobs(ops, cpu)", id="logprobs"),
        pytest.param("checks.check_limits(ops, cpu)", id="limits"),
        pytest.param("checks.check_odd_rows(ops, cpu), checks.check_contradictions(ops, cpu)", id="refused"),
        pytest.param("checks.check_large(ops, cpu)", id="large", marks=pytest.mark.full),
    ],
)
def test_the_kernels_sample_what_float64_does_in_tritons_interpreter(check: str) -> None:
    interpret(INTERPRETED.format(check))


@pytest.mark.cuda
@needs_cuda
def test_the_kernels_sample_what_float64_does_on_a_gpu() -> None:
    from llama_core.backends.fused.kernels import TritonOps

    ops, device = TritonOps(), torch.device("cuda")
    check_samples(ops, device, 300)
    check_rules(ops, device, 300)
    check_edits(device, 300)
    check_logprobs(ops, device)
    check_odd_rows(ops, device)
    check_contradictions(ops, device)
    check_limits(ops, device)
    check_large(ops, device)
