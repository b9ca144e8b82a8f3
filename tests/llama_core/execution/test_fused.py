"""The fused backend: most of it is tested on the CPU, kernels and CUDA graphs on a GPU.

That its tokens and logits are the reference's, on several ranks and in any batch, is in test_equivalence.py.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from llama_core.execution.fused.step_plan import bucket_sizes
from llama_core.execution.parallel import alone
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.conftest import GOLDEN
from tests.support import on_ranks
from tests.support.interpreter import interpret
from tests.support.kernel_differences import assert_small

MP1 = str(GOLDEN / "mp1")


@pytest.mark.parametrize("largest", [1, 3, 8, 33, 64, 264])
def test_every_number_of_tokens_has_a_bucket_that_is_not_much_larger(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for count in range(1, largest + 1):
        bucket = next(size for size in sizes if size >= count)
        assert bucket <= max(2 * count, count + 31)


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
from tests.support.kernel_differences import largest_differences
print(json.dumps([largest_differences(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.float16)]))
"""


def test_the_kernels_compute_what_torch_does_in_tritons_interpreter() -> None:
    printed = interpret(KERNELS)
    for differences, dtype in zip(json.loads(printed), (torch.float32, torch.float16), strict=True):
        assert_small(differences, dtype)


@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.full)])
def test_kernels_of_random_shapes_compute_what_float64_does_in_tritons_interpreter(examples: int) -> None:
    interpret(f"""
import torch
from tests.support.kernel_differences import check_beside_float64
for dtype in (torch.float32, torch.float16):
    check_beside_float64(torch.device("cpu"), dtype, {examples})
""")


@pytest.mark.parametrize("rows", [("64",), pytest.param(("1", "20"), marks=pytest.mark.full)], ids=" and ".join)
def test_every_kernel_compiles_for_gpus_that_this_machine_lacks(rows: tuple[str, ...]) -> None:
    """`make gpu-check` compiles for further GPUs, dtypes, families and numbers of rows."""
    command = [sys.executable, "-m", "tests.programs.gpu_check", "--sm", "90", "--dtype", "bfloat16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--ranks", "1", "--family", "Llama 3 8B", "--vocab", "128256", "--rows", *rows, "--format"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    layer = ("_add_norm", "_add_time", "_attend", "_combine_splits", "_gated_silu", "_multiply", "_rotate_and_store")
    products = ("_gated_product", "_product_of_rows")
    ends = ("_embed", "_store_samples")
    head = ("_greatest", "_spread", "_pick", "_copy_allowed", "_apply_rules", "_chunk_logprobs", "_combine_logprobs")
    for kernel in (*layer, *products, *ends, *head):
        assert done.stdout.count(f"{kernel} ") == 1, done.stdout
