"""The fused backend: most of it is tested on the CPU, kernels and CUDA graphs on a GPU.

That its tokens and logits are the reference's, on several ranks and in any batch, is in test_equivalence.py.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from llama_core.execution.fused.backend import FusedBackend
from llama_core.execution.fused.ops import HeadNorms, TorchOps
from llama_core.execution.fused.sampling_head import bucket_sizes
from llama_core.execution.parallel import alone
from llama_core.execution.rotary import rotary_table
from llama_core.execution.sampling import sample, sample_sorted
from llama_core.execution.sampling_tensors import SamplingTensors
from llama_core.generation import Llama
from llama_core.model_config import RopeConfig
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.conftest import GOLDEN
from tests.support import on_ranks

MP1 = str(GOLDEN / "mp1")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("largest", [1, 3, 8, 33, 64, 264])
def test_every_number_of_tokens_has_a_bucket_that_is_not_much_larger(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for count in range(1, largest + 1):
        bucket = next(size for size in sizes if size >= count)
        assert bucket <= max(2 * count, count + 31)


@pytest.mark.parametrize("vocab", [40, 3000])
def test_sampling_without_a_branch_gives_the_same_tokens(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 64
    logits = torch.randn(rows, vocab, generator=generator) * 3
    sampling = SamplingTensors.of(
        SamplingParams(),
        rows,
        temperature=torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(rows // 4),
        top_p=torch.rand(rows, generator=generator),
        top_k=torch.tensor([0, 0, 1, 7, 0, 39]).repeat(rows)[:rows],
        seed=torch.arange(rows) * 77,
    )
    positions = torch.arange(rows) % 9
    expected = sample(logits, sampling, positions)
    assert torch.equal(sample_sorted(logits, sampling, positions), expected)
    assert len(set(expected.tolist())) > 8


def step_of(number: int, starts: list[int], admit: list[SlotInit]) -> StepInput:
    return StepInput(0, number, [Row(slot, start, 1, True) for slot, start in enumerate(starts)], admit=admit)


def test_a_step_may_start_before_the_one_before_it_was_read() -> None:
    """Five rows in a bucket of eight, three decode steps: read one by one, and always one behind."""
    runner = on_ranks.build(alone("cpu"), MP1, backend="fused").runner
    prompts = [[1, 5 + i, 40 + i] for i in range(5)]

    def run(is_behind: bool) -> list[list[int]]:
        blocks = runner.config.blocks_per_sequence
        admit = [
            SlotInit(i, prompt, list(range(i * blocks, (i + 1) * blocks)), SamplingParams(0.9 * (i % 2), seed=i))
            for i, prompt in enumerate(prompts)
        ]
        sampled = [runner.step(StepInput(0, 0, [Row(i, 0, 3, True) for i in range(5)], admit=admit)).tokens]
        in_flight = []
        for number in range(1, 4):
            step = runner.start(step_of(number, [2 + number] * 5, []))
            assert not step.is_done
            in_flight.append(step)
            if not is_behind or len(in_flight) > 1:
                sampled.append(in_flight.pop(0).result().tokens)
        sampled += [step.result().tokens for step in in_flight]
        return sampled

    one_by_one = run(False)
    assert run(True) == one_by_one
    assert len({tuple(row) for row in zip(*one_by_one, strict=True)}) == 5


def test_a_slot_given_to_another_sequence_before_its_step_was_read_changes_no_output() -> None:
    """The step has a row of a sequence that ended; the next step gives the slot to a request for prompt logprobs."""
    runner = on_ranks.build(alone("cpu"), MP1, backend="fused").runner
    prompt = [1, 5, 40]
    runner.step(StepInput(0, 0, [Row(0, 0, 3, True)], admit=[SlotInit(0, prompt, [0], SamplingParams(0.0))]))
    expected = runner.step(step_of(1, [3], [])).tokens
    runner.step(StepInput(0, 0, [Row(0, 0, 3, True)], admit=[SlotInit(0, prompt, [0], SamplingParams(0.0))]))
    wasted = runner.start(step_of(1, [3], []))
    heir = SlotInit(0, [1, *range(4, 40)], [1, 2, 3], SamplingParams(0.0, logprobs=0), prompt_logprobs=True)
    following = runner.start(StepInput(0, 2, [Row(0, 0, 37, True)], admit=[heir]))
    output = wasted.result()
    assert output.tokens == expected and output.prompt_logprobs == []
    assert len(following.result().prompt_logprobs[0].values) == 36


def test_logprobs_are_those_of_their_step_after_the_next_one_was_started_in_the_same_slot() -> None:
    admit = [SlotInit(0, [1, 9, 30], [0], SamplingParams(0.0, logprobs=2))]
    first = StepInput(0, 0, [Row(0, 0, 3, True)], admit=admit)
    reference = on_ranks.build(alone("cpu"), MP1, backend="torch").runner.step(first)
    runner = on_ranks.build(alone("cpu"), MP1, backend="fused").runner
    step = runner.start(first)
    heir = SlotInit(0, [1, 77], [1], SamplingParams(0.0))
    following = runner.start(StepInput(0, 1, [Row(0, 0, 2, True)], admit=[heir]))
    output = step.result()
    assert output.tokens == reference.tokens and following.result().logprobs == []
    [mine], [theirs] = output.logprobs, reference.logprobs
    assert mine is not None and theirs is not None
    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
    assert [token for token, _ in mine.top] == [token for token, _ in theirs.top] and len(mine.top) == 2
    assert mine.top[0] == (output.tokens[0], mine.logprob)


KERNELS = """
import json
import torch
from tests.llama_core.execution.test_fused import largest_differences
print(json.dumps([largest_differences(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.float16)]))
"""


def largest_differences(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The largest difference of each kernel from torch, over several shapes."""
    from llama_core.execution.fused.kernels import TritonOps

    kernels, meaning = TritonOps(), TorchOps()
    generator = torch.Generator().manual_seed(1)
    worst: dict[str, float] = {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def compare(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        worst[name] = max(worst.get(name, 0.0), (mine.double() - theirs.double()).abs().max().item())

    for n_heads, n_kv_heads, head_dim, block_size in ((4, 4, 16, 16), (6, 2, 24, 16), (8, 1, 64, 32)):
        count, dim = 5, n_heads * head_dim
        states, delta, weight = random(count, dim), random(count, dim), random(dim)
        mine, theirs = states.clone(), states.clone()
        compare("norm", kernels.add_norm(mine, delta, weight, 1e-5), meaning.add_norm(theirs, delta, weight, 1e-5))
        compare("sum", mine, theirs)
        compare("first norm", kernels.add_norm(mine, None, weight, 1e-5), meaning.add_norm(mine, None, weight, 1e-5))
        compare(
            "biased",
            kernels.add_norm(mine, delta, weight, 1e-5, weight),
            meaning.add_norm(theirs, delta, weight, 1e-5, weight),
        )
        gate_up, gate_bias = random(count, 2 * 1100), random(2 * 1100)
        compare("gate", kernels.gated_silu(gate_up), meaning.gated_silu(gate_up))
        compare("biased gate", kernels.gated_silu(gate_up, gate_bias), meaning.gated_silu(gate_up, gate_bias))
        table = rotary_table(RopeConfig(), head_dim, 400, device)
        qkv = random(count, n_heads + 2 * n_kv_heads, head_dim)
        positions, write = torch.tensor([[0, 3, 77, 150, 299], [5, 17, 40, 99, 3]], device=device)
        cache = [torch.zeros(40, block_size, n_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(4)]
        bias, norms = random(qkv[0].numel()), HeadNorms(random(head_dim), random(head_dim), 1e-5)
        for switches in ((bias, None), (None, norms), (bias, norms), (None, None)):
            q = kernels.rotate_and_store(qkv.clone(), table, positions, write, cache[0], cache[1], *switches)
            expected = meaning.rotate_and_store(qkv.clone(), table, positions, write, cache[2], cache[3], *switches)
            compare("queries", q, expected)
            compare("keys", cache[0], cache[2])
            compare("values", cache[1], cache[3])
    return worst


def assert_small(differences: dict[str, float], dtype: torch.dtype) -> None:
    limit = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 0.07}[dtype]
    assert all(value <= limit for value in differences.values()), differences


def test_the_kernels_compute_what_torch_does_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for differences, dtype in zip(json.loads(done.stdout), (torch.float32, torch.float16), strict=True):
        assert_small(differences, dtype)


def test_every_kernel_compiles_for_gpus_that_this_machine_lacks() -> None:
    """`make gpu-check` compiles for further GPUs, dtypes and families."""
    command = [sys.executable, "-m", "tests.programs.gpu_check", "--sm", "80", "90", "--dtype", "bfloat16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--ranks", "1", "--family", "Llama 3 8B"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    layer = ("_add_norm", "_attend", "_combine_splits", "_gated_silu", "_multiply", "_rotate_and_store")
    head = ("_greatest", "_spread", "_pick", "_copy_allowed", "_apply_rules", "_chunk_logprobs", "_combine_logprobs")
    for kernel in (*layer, *head):
        assert done.stdout.count(f"{kernel} ") == 2, done.stdout


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_compute_what_torch_does_on_a_gpu(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_small(largest_differences(torch.device("cuda"), dtype), dtype)


@pytest.mark.cuda
@needs_cuda
def test_decode_steps_are_graphs_and_give_the_references_tokens(golden: dict[str, Any]) -> None:
    llama = Llama.build(MP1, MP1 + "/tokenizer.model", 160, 8, dtype="float32", device="cuda", speculation=False)
    backend = llama.runner.backend
    assert isinstance(backend, FusedBackend)
    assert "CUDA graphs" in backend.name, "the capture failed"
    for case in golden["completions"]:
        assert llama.generate(case["prompt_tokens"], case["max_gen_len"], 0, echo=case["echo"])[0] == case["out_tokens"]


@pytest.mark.cuda
@needs_cuda
def test_a_seeded_request_samples_the_same_in_graphs_and_without_them() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cuda"}
    prompts = [[1, 5 + i, 9] for i in range(5)]
    texts = [
        Llama.build(MP1, MP1 + "/tokenizer.model", 160, 8, backend=name, **settings).generate(
            prompts, 40, temperature=0.9, top_p=0.9, seed=4
        )[0]
        for name in ("fused", "torch")
    ]
    assert texts[0] == texts[1]


@pytest.mark.cuda
@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_gpus_give_what_one_gives(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "from llama_core.generation import Llama\n"
        "llama = Llama.build(sys.argv[1], sys.argv[1] + '/tokenizer.model', 160, 8, dtype='float32', device='cuda')\n"
        "tokens = llama.generate([[1, 5, 9], [1, 77]], 30, temperature=0.9, seed=4)[0]\n"
        "if llama.runner.parallel.rank == 0:\n"
        "    open(sys.argv[2], 'w').write(json.dumps([tokens, llama.runner.backend.name]))\n"
    )
    results = []
    for ranks in ("1", "2"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        answer = tmp_path / f"{ranks}.json"
        subprocess.run([*command, str(program), MP1, str(answer)], check=True, timeout=200)
        results.append(json.loads(answer.read_text()))
    assert results[0] == results[1]
    assert "CUDA graphs" in results[1][1]
