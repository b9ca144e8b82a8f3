"""Native bits of a request do not depend on how it is computed, for every weight format and both types of activations.

Tokens and log-probabilities are compared with ==: alone, batched with others, in chunks, behind a cached prefix and preempted,
on one rank and on two. `test_switches.py` has drafts.
"""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from llama_core.backends.parallel import alone
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.weight_formats import QUANTIZED
from tests.support import checkpoints, on_ranks

# On two ranks, wo has 48 inputs: no whole groups of 32.
ODD = {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "multiple_of": 96, "norm_eps": 1e-5, "vocab_size": -1}
NATIVE = [name for name in QUANTIZED if name != "fp8"]
CASES = [(dtype, name) for dtype in ("float32", "bfloat16") for name in ("none", *NATIVE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights = checkpoints.random_weights(ODD, scale=0.175)
    return str(checkpoints.write(tmp_path_factory.mktemp("invariance"), [weights], ODD))


def requests(count: int = 6) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(5)
    found = []
    for i in range(count):
        prompt = [1] + [draw.randrange(3, 640) for _ in range(draw.randrange(20, 70))]
        sampled = SamplingParams(0.9, seed=i, max_tokens=12, logprobs=0, ignore_eos=True)
        found.append((prompt, replace(sampled, temperature=0.0) if i % 3 == 0 else sampled))
    return found


def runs(parallel: Any, model: str, dtype: str, quantization: str) -> dict[str, Any]:
    """The outputs and log-probabilities of the same requests, computed in each way; and what happened meanwhile."""
    given = requests()
    serve = partial(on_ranks.serve, parallel, model, dtype=dtype, backend="native", quantization=quantization)
    single = [serve([request]) for request in given]
    expected = {key: [run[key][0] for run in single] for key in ("outputs", "logprobs")}
    chunked = serve(given, max_step_tokens=17, arrivals=[0, 3, 1, 7, 2, 5])
    twice = serve([*given, *given], arrivals=[0] * 6 + [90] * 6)
    # Short prompts with long outputs: the scheduler admits all at once, and then the blocks run out.
    short = [(prompt[:5], replace(params, max_tokens=60)) for prompt, params in given]
    undisturbed, crowded = serve(short), serve(short, num_blocks=12)
    return {
        "expected": expected,
        "chunked": {key: chunked[key] for key in expected},
        "again": {key: twice[key][6:] for key in expected},
        "undisturbed": {key: undisturbed[key] for key in expected},
        "crowded": {key: crowded[key] for key in expected},
        "prefix_hits": twice["prefix_hits"],
        "preemptions": crowded["preemptions"],
    }


def check(found: dict[str, Any]) -> None:
    expected = found["expected"]
    assert len({tuple(output) for output in expected["outputs"]}) == 6, "otherwise equal outputs would show little"
    assert found["prefix_hits"] > 0 and found["preemptions"] > 0
    assert found["chunked"] == expected
    assert found["again"] == expected
    assert found["crowded"] == found["undisturbed"]


@pytest.mark.parametrize(("dtype", "quantization"), CASES)
def test_bits_are_those_of_the_request_alone(model: str, dtype: str, quantization: str) -> None:
    check(runs(alone("cpu"), model, dtype, quantization))


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "int4"), ("bfloat16", "int4_min")])
def test_bits_on_two_ranks_are_those_of_the_request_alone_on_two(
    ranks: Any, model: str, dtype: str, quantization: str
) -> None:
    for found in ranks(2).call(runs, model, dtype, quantization):
        check(found)
