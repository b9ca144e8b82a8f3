"""Penalties, biases and lists of tokens change logits as transformers, OpenAI and vLLM define them."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from llama_core.backends.parallel import alone
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.llama_core.backends.fused.sampling_cases import Case
from tests.support import checkpoints, on_ranks

VOCAB = 300
PROMPT = [5, 9, 9, 40, 299]
GENERATED = [7, 9, 7, 7, 120]
SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": -1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights = checkpoints.random_weights(SHAPE, scale=0.175)
    return str(checkpoints.write(tmp_path_factory.mktemp("rules"), [weights], SHAPE))


def logits(seed: int = 3) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def edited(params: SamplingParams, delayed: tuple[int, ...] = ()) -> torch.Tensor:
    init = SlotInit(0, [*PROMPT, *GENERATED], [0], params, prompt_length=len(PROMPT), delayed=delayed)
    return Case(logits()[None], [params], [init], [None]).edited()[0]


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([[*PROMPT, *GENERATED]]), logits()[None].clone())[0]
    assert torch.equal(edited(SamplingParams(repetition_penalty=1.7)), expected)


def test_logit_biases_are_those_of_transformers() -> None:
    biases = {(3,): 5.0, (40,): -100.0, (299,): 0.25}
    expected = SequenceBiasLogitsProcessor(biases)(torch.tensor([PROMPT]), logits()[None].clone())[0]
    assert torch.equal(edited(SamplingParams(logit_bias=tuple((i[0], b) for i, b in biases.items()))), expected)


def test_presence_and_frequency_penalties_follow_openais_formula() -> None:
    expected = logits()
    for token in range(VOCAB):
        count = GENERATED.count(token)
        expected[token] = expected[token] - count * 0.6 - float(count > 0) * 1.3
    found = edited(SamplingParams(frequency_penalty=0.6, presence_penalty=1.3))
    assert torch.allclose(found, expected, atol=1e-6)
    assert (found != logits()).sum() == 3


def test_logits_change_in_the_order_of_vllm() -> None:
    """A biased logit is penalized with its bias; a token that is not allowed stays so."""
    params = SamplingParams(logit_bias=((7, 50.0), (9, -60.0), (8, 100.0)), bad_words=((8,),), repetition_penalty=2.0)
    found, given = edited(params), logits()
    assert found[7] == (given[7] + 50.0) / 2
    assert found[9] == (given[9] - 60.0) * 2
    assert found[8] == -math.inf


def test_a_bad_word_is_banned_where_its_beginning_was_generated() -> None:
    banned = edited(SamplingParams(bad_words=((7, 120, 4), (120, 6), (9, 120, 3), (299, 7, 2), (33,))))
    assert (banned == -math.inf).nonzero().flatten().tolist() == [4, 6, 33]


def test_ends_are_delayed_until_enough_tokens_were_generated() -> None:
    assert edited(SamplingParams(min_tokens=6), delayed=(2, 50))[[2, 50]].tolist() == [-math.inf] * 2
    assert torch.equal(edited(SamplingParams(min_tokens=5), delayed=(2, 50)), logits())


def test_only_allowed_tokens_and_ends_stay() -> None:
    found = edited(SamplingParams(allowed_token_ids=(11, 290)), delayed=(2,))
    assert found.isfinite().nonzero().flatten().tolist() == [2, 11, 290]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_contradictory_rules_refuse_the_row_and_no_other(model: str, backend: str) -> None:
    runner = on_ranks.build(alone("cpu"), model, backend=backend).runner
    never = SamplingParams(0.0, allowed_token_ids=(5,), bad_words=((5,),))
    inits = [SlotInit(0, [1, 7], [0], never), SlotInit(1, [1, 7], [1], SamplingParams(0.0))]
    output = runner.step(StepInput(0, 0, [Row(0, 0, 2, True), Row(1, 0, 2, True)], admit=inits))
    expected = runner.step(StepInput(0, 0, [Row(0, 0, 2, True)], admit=[replace(inits[1], slot=0)]))
    assert [i for i, _ in output.refused] == [0] and not output.non_finite
    assert output.tokens[1] == expected.tokens[0] and not expected.refused


def test_generation_stops_at_a_stop_token_and_not_before_min_tokens(model: str) -> None:
    greedy = SamplingParams(0.0, max_tokens=12)
    [free] = on_ranks.serve(alone("cpu"), model, [([1, 50], replace(greedy, ignore_eos=True))])["outputs"]
    stop = free[4]
    [stopped] = on_ranks.serve(alone("cpu"), model, [([1, 50], replace(greedy, stop_token_ids=(stop,)))])["outputs"]
    assert stopped == free[: free.index(stop)]
    later = replace(greedy, stop_token_ids=(stop,), min_tokens=10)
    [delayed] = on_ranks.serve(alone("cpu"), model, [([1, 50], later)])["outputs"]
    assert len(delayed) >= 10 and stop not in delayed[:10]
