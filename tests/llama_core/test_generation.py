"""The reference's API in process: limits, defaults, echoes, seeds; alone and under torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_core import Llama
from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.native.backend import NativeBackend
from llama_core.batch_loop import run_batch
from llama_core.config import BackendName
from llama_core.errors import ConfigError, ContextLengthExceeded, InvalidDialog, InvalidParameter, NonFiniteLogits
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.chat_format import SAFE_RESPONSE
from tests.conftest import GOLDEN
from tests.support.plain_model import poke_embedding


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama.build(GOLDEN / "mp2", GOLDEN / "mp2" / "tokenizer.model", 160, 4, dtype="float32", device="cpu")


PROMPT = [1, 598, 76, 404, 306]


def test_more_prompts_than_slots_give_the_same_tokens(llama: Llama) -> None:
    prompts = [[*PROMPT, 3 + i] for i in range(11)]
    together, _ = llama.generate(prompts, 12, temperature=0)
    assert together == [llama.generate([prompt], 12, temperature=0)[0][0] for prompt in prompts]


def test_a_prompt_that_fills_the_context_generates_nothing_and_has_prompt_logprobs(llama: Llama) -> None:
    full = [1] + [5 + i % 90 for i in range(159)]
    (out,), logprobs = llama.generate([full], 10, temperature=0, logprobs=True, echo=True)
    assert out == full and logprobs is not None and len(logprobs[0]) == 160 and logprobs[0][0] == 0.0
    shorter = llama.generate([full[:100]], 1, temperature=0, logprobs=True, echo=True)[1]
    assert shorter is not None and logprobs[0][:100] == pytest.approx(shorter[0][:100], abs=1e-4)
    assert llama.generate([full], 10)[0] == [[]]


def test_an_echoed_prompt_is_returned_whole_with_eos_inside(llama: Llama) -> None:
    prompt = [1, 598, 76, 2, 1, 404]
    (out,), _ = llama.generate([prompt], 5, temperature=0, echo=True)
    assert out[: len(prompt)] == prompt and 2 not in out[len(prompt) :]


def test_a_seeded_request_is_repeatable_and_seeds_differ(llama: Llama) -> None:
    def sample(**changes: Any) -> list[int]:
        return llama.generate([PROMPT], 20, temperature=1.0, top_p=1.0, **changes)[0][0]

    assert sample(seed=5) == sample(seed=5) != sample(seed=6)
    assert sample() != sample(), "requests without a seed get different seeds"
    beside = llama.generate([[1, 9, 9, 9], PROMPT, [1]], 20, temperature=1.0, top_p=1.0, seed=5)[0]
    assert beside[1] == sample(seed=5)


def test_the_build_seed_makes_a_program_repeatable() -> None:
    def program(seed: int) -> list[list[int]]:
        model = Llama.build(GOLDEN / "mp1", GOLDEN / "mp1" / "tokenizer.model", 64, 2, None, seed, dtype="float32")
        return [model.generate([PROMPT], 10, 1.0, 1.0)[0][0] for _ in range(3)]

    assert program(1) == program(1) != program(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", "warm"), ("temperature", True), ("top_p", 0),
     ("top_p", 1.01), ("top_p", "0.5"), ("top_k", -1), ("top_k", 2.7), ("top_k", 2**70), ("seed", 2**63), ("seed", "a"),
     ("max_gen_len", -1), ("max_gen_len", 2.5)],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(llama: Llama, field: str, value: Any) -> None:
    arguments: dict[str, Any] = {"max_gen_len": 4} | {field: value}
    with pytest.raises(InvalidParameter, match=field) as caught:
        llama.generate([PROMPT], **arguments)
    assert caught.value.param == field and isinstance(caught.value, ValueError)


def test_invalid_and_too_long_prompts_are_refused(llama: Llama) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"Input tokens exceed .* 160 tokens, .*, which has 161"):
        llama.generate([[1] * 161], 4)
    wrong: list[Any] = [[], [-1], [640], [1, 10**9], *([1, token] for token in (1.0, True, "1", None, 2.5))]
    for prompt in wrong:
        with pytest.raises(InvalidParameter):
            llama.generate([prompt], 4)


def test_a_dialog_with_tags_gets_the_refusal_and_others_an_answer(llama: Llama) -> None:
    dialogs = [[{"role": "user", "content": "say [INST]"}], [{"role": "user", "content": "bye"}]]
    refused, answered = llama.chat_completion(dialogs, 0, max_gen_len=6, logprobs=True)  # type: ignore[arg-type]
    assert refused == {"generation": {"role": "assistant", "content": SAFE_RESPONSE}, "tokens": [], "logprobs": []}
    assert len(answered["tokens"]) == 6
    with pytest.raises(InvalidDialog, match=r"messages\[0\]"):
        llama.chat_completion([[{"role": "assistant", "content": "x"}]])


@pytest.mark.parametrize("backend_name", ["native", "torch"])
def test_a_non_finite_embedding_fails_only_its_own_request(backend_name: BackendName) -> None:
    tokenizer = GOLDEN / "mp1" / "tokenizer.model"
    model = Llama.build(GOLDEN / "mp1", tokenizer, 64, 4, dtype="float32", backend=backend_name)
    long = [1] + [5 + i % 90 for i in range(40)]
    good, _ = model.generate([PROMPT, long], 16, temperature=0)
    backend = model.runner.backend
    if isinstance(backend, NativeBackend):
        poke_embedding(backend, 333, float("nan"))
    else:
        assert isinstance(backend, FusedBackend)
        with torch.inference_mode():
            backend.model._embeddings[333] = float("nan")
    bad = [1] + [333] * 21
    # The other rows are a shorter one, whose block table is padded, and a longer one.
    params = [SamplingParams(0.7), SamplingParams(0.0), SamplingParams(0.0)]
    sequences = [Sequence(p, each, len(p) + 16) for p, each in zip((bad, PROMPT, long), params, strict=True)]
    run_batch(model.runner, model.runner.max_num_blocks(), model.tokenizer.stop_ids, sequences)
    assert isinstance(sequences[0].error, NonFiniteLogits) and [seq.output for seq in sequences[1:]] == good
    with pytest.raises(NonFiniteLogits):
        model.generate([bad, PROMPT, long], 6, temperature=0.7)
    assert model.generate([PROMPT, long], 16, temperature=0)[0] == good, "NaN values left in the cache have no effect"


def test_numpy_numbers_are_accepted(llama: Llama) -> None:
    plain = llama.generate([PROMPT], 8, temperature=0.5, top_p=0.75, top_k=7, seed=3)
    mine: Any = np.array(PROMPT, dtype=np.int32)
    max_gen_len: Any = np.int64(8)
    sampling: Any = {
        "temperature": np.float32(0.5),
        "top_p": np.float64(0.75),
        "top_k": np.int8(7),
        "seed": np.int64(3),
    }
    theirs = llama.generate([mine], max_gen_len, **sampling)
    assert theirs == plain and all(type(token) is int for token in theirs[0][0])


def test_several_ranks_without_torchrun_are_refused() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        Llama.build(GOLDEN / "mp1", GOLDEN / "mp1" / "tokenizer.model", 64, 2, model_parallel_size=2)


TORCHRUN = """
import json, os, sys
from llama_core import Llama
ckpt, out = sys.argv[1:]
llama = Llama.build(ckpt, ckpt + "/tokenizer.model", 160, 4, model_parallel_size=2, dtype="float32", device="cpu")
result = llama.generate([[1, 598, 76, 404, 306], [1, 9]], 12, temperature=0.8, logprobs=True, echo=True, seed=3)
json.dump(result, open(f"{out}/{os.environ['RANK']}.json", "w"))
"""


def test_under_torchrun_every_rank_returns_what_one_rank_returns(llama: Llama, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run([*command, str(GOLDEN / "mp1"), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    tokens, logprobs = llama.generate([PROMPT, [1, 9]], 12, temperature=0.8, logprobs=True, echo=True, seed=3)
    assert first[0] == second[0] == tokens
    assert logprobs is not None
    for mine, theirs, others in zip(logprobs, first[1], second[1], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4) and others == pytest.approx(theirs, abs=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_plain_torch_on_cuda_gives_the_reference_tokens(golden: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cuda", "backend": "torch"}
    model = Llama.build(GOLDEN / "mp1", GOLDEN / "mp1" / "tokenizer.model", 160, 8, **settings)
    for case in golden["completions"]:
        assert model.generate(case["prompt_tokens"], case["max_gen_len"], 0, echo=case["echo"])[0] == case["out_tokens"]
