"""The fused backend on a GPU: its kernels beside torch, its logits beside float64, its graphs beside eager steps.

Needs torch, Triton, NumPy and pytest alone. What needs no Triton runs on the CPU too, so that these tests are tested there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.batch_loop import run_batch
from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Row, SlotInit, StepInput
from tests.llama_core.backends.fused.kernel_differences import check_adapters, check_beside_float64, check_copies
from tests.support.plain_model import decoder, forward, load_runner, random_weights

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "data" / "golden"
GOLDEN_VOCABULARY, GOLDEN_END = 640, 2
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])
MODELS = {
    "every head its own keys": decoder(48, 2, 4, 4, 16, 96, 90),
    "grouped queries": decoder(64, 2, 6, 2, 24, 160, 90),
    "a window of 20": decoder(64, 3, 8, 1, 32, 96, 90, windows=(20, 0, 20)),
    "biases": decoder(48, 2, 4, 2, 16, 96, 90, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "norms of heads": decoder(64, 2, 4, 2, 64, 96, 90, qk_norm=True),
    "heads of 128": decoder(64, 2, 4, 1, 128, 96, 90),
    "heads of 256": decoder(64, 2, 2, 1, 256, 96, 90, windows=(20, 0)),
}
TOKENS = [1 + (7 * i) % 89 for i in range(80)]
TOLERANCE = {"float32": 5e-4, "float16": 0.05, "bfloat16": 0.3}


def new_runner(device: str, model: ModelConfig, **settings: Any) -> ModelRunner:
    cache = {"kv_cache_bytes": 2**26} if device == "cuda" else {}
    return load_runner(alone(device), model, device=device, backend="fused", **cache | settings)  # type: ignore[arg-type]


def admit(runner: ModelRunner, slot: int, tokens: list[int], params: SamplingParams) -> SlotInit:
    blocks = runner.config.blocks_per_sequence
    return SlotInit(slot, tokens, list(range(slot * blocks, (slot + 1) * blocks))[::-1], params)


def generated(runner: ModelRunner, prompts: list[list[int]], count: int, temperature: float) -> list[list[int]]:
    sequences = [
        Sequence(prompt, SamplingParams(temperature, seed=i, max_tokens=count, ignore_eos=True), len(prompt) + count)
        for i, prompt in enumerate(prompts)
    ]
    run_batch(runner, runner.max_num_blocks(), frozenset(), sequences)
    return [sequence.output for sequence in sequences]


@on_both
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_chunks_decodes_and_drafts_of_one_step_have_the_logits_of_float64(device: str, model: ModelConfig) -> None:
    """One slot reads its prompt in three chunks, beside one that decodes and one that checks two drafts. Drafts also put the
    known tokens back in the place of sampled ones."""
    runner = new_runner(device, model)
    expected = forward(model, random_weights(model), TOKENS, 160)
    params = SamplingParams(temperature=0.0, logprobs=0)
    slots = [admit(runner, slot, TOKENS, params) for slot in range(3)]
    runner.step(StepInput(0, 0, [Row(1, 0, 40, False), Row(2, 0, 50, False)], admit=slots))
    for number, (start, length) in enumerate(((0, 33), (33, 46), (79, 1))):
        place = 40 + number
        rows = [Row(0, start, length, True), Row(1, place, 1, True), Row(2, 50 + 3 * number, 3, True, 2)]
        first = rows[2].start + 1
        drafts = [Draft(2, first, TOKENS[first : first + 2])]
        known = [Draft(slot, at, [TOKENS[at]]) for slot, at in ((0, start), (1, place), (2, rows[2].start))]
        runner.step(StepInput(0, 1 + number, rows, drafts=[*drafts, *known]))
        logits = runner.backend.logits_of_samples(range(5)).double().cpu()
        after = [start + length - 1, place, first - 1, first, first + 1]
        assert (logits - expected[after]).abs().max() < TOLERANCE["float32"], number


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_references_tokens_are_generated(device: str) -> None:
    settings: dict[str, Any] = {"device": device, "dtype": "float32", "backend": "fused"}
    config = EngineConfig(str(GOLDEN / "mp1"), GOLDEN_VOCABULARY, 512, 8, kv_cache_bytes=2**26, **settings)
    runner = ModelRunner.load(config, alone(config.device))
    runner.allocate_cache(runner.max_num_blocks())
    assert ("CUDA graphs" in runner.backend.name) == (device == "cuda")
    cases = json.loads((GOLDEN / "golden.json").read_text())["completions"]
    for case in (case for case in cases if not case["echo"]):
        sequences = [
            Sequence(prompt, SamplingParams(0.0, max_tokens=case["max_gen_len"]), len(prompt) + case["max_gen_len"])
            for prompt in case["prompt_tokens"]
        ]
        run_batch(runner, runner.max_num_blocks(), frozenset({GOLDEN_END}), sequences)
        assert [sequence.output for sequence in sequences] == case["out_tokens"]


@on_both
def test_steps_without_graphs_give_the_same_tokens(device: str) -> None:
    runner = new_runner(device, MODELS["a window of 20"])
    assert isinstance(runner.backend, FusedBackend)
    assert ("CUDA graphs" in runner.backend.name) == (device == "cuda"), "the capture failed"
    prompts = [TOKENS[i : i + 12 + 9 * i] for i in range(5)]
    in_graphs = [generated(runner, prompts, 30, temperature) for temperature in (0.0, 0.9)]
    runner.backend.release_graphs()
    assert [generated(runner, prompts, 30, temperature) for temperature in (0.0, 0.9)] == in_graphs
    assert in_graphs[0] != in_graphs[1]


@pytest.mark.cuda
@needs_cuda
def test_adapters_add_what_torch_does() -> None:
    check_adapters(torch.device("cuda"))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_compute_what_torch_and_float64_do_on_a_gpu(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_copies(torch.device("cuda"), dtype)
    for seed in range(60):
        check_beside_float64(torch.device("cuda"), dtype, seed)


@pytest.mark.cuda
@needs_cuda
def test_every_kernel_is_launched_by_the_program_for_memcheck() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.every_kernel", "cuda"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


RANKS_PROGRAM = """
import json, sys
from llama_core.batch_loop import run_batch
from llama_core.config import EngineConfig
from llama_core.backends.parallel import from_torchrun, leave
from llama_core.backends.runner import ModelRunner
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams

folder, answer = sys.argv[1:]
config = EngineConfig(folder, 640, 160, 8, device="cuda", dtype="float32", backend="fused")
runner = ModelRunner.load(config, from_torchrun("cuda"))
runner.allocate_cache(runner.max_num_blocks())
sequences = [Sequence(p, SamplingParams(0.9, seed=4, max_tokens=30, ignore_eos=True), 60) for p in ([1, 5, 9], [1, 77])]
run_batch(runner, runner.max_num_blocks(), frozenset(), sequences)
if runner.parallel.rank == 0:
    open(answer, "w").write(json.dumps([[s.output for s in sequences], runner.backend.name]))
leave()
"""


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    program, results = tmp_path / "program.py", []
    program.write_text(RANKS_PROGRAM)
    for ranks in ("1", "2"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        answer = tmp_path / f"{ranks}.json"
        words = [str(program), str(GOLDEN / "mp1"), str(answer)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *words], check=True, timeout=200, env=environment)
        results.append(json.loads(answer.read_text()))
    assert results[0] == results[1]
    assert "CUDA graphs" in results[1][1]
