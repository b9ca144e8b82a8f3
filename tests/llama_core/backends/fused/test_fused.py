"""The fused backend: most of it is tested on the CPU, kernels and CUDA graphs on a GPU.

That its tokens and logits are the reference's, on several ranks and in any batch, is in test_equivalence.py.
"""

import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from llama_core.backends.fused.device import choose_ops
from llama_core.errors import ConfigError
from tests.support.forking import interpret


@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.full)])
def test_kernels_compute_what_torch_and_float64_do_in_tritons_interpreter(examples: int) -> None:
    interpret(f"""
import torch
from tests.llama_core.backends.fused.kernel_differences import check_beside_float64, check_copies
for dtype in (torch.float32, torch.float16):
    check_copies(torch.device("cpu"), dtype)
for seed in range({examples}):
    for dtype in (torch.float32, torch.float16):
        check_beside_float64(torch.device("cpu"), dtype, seed)
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
    layer = ("_add_norm", "_add_time", "_attend", "_combine_splits", "_gate", "_multiply", "_rotate_and_store")
    products = ("_gated_product", "_product_of_rows")
    adapters = ("_shrink", "_expand")
    ends = ("_embed", "_store_samples")
    head = ("_greatest", "_spread", "_pick", "_copy_allowed", "_apply_rules", "_chunk_logprobs", "_combine_logprobs")
    for kernel in (*layer, *adapters, *products, *ends, *head):
        assert done.stdout.count(f"{kernel} ") == 1, done.stdout


def test_a_gpu_on_which_triton_does_not_work_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch, attention would gather block tables for which no memory is planned."""
    kernels: Any = ModuleType("llama_core.backends.fused.kernels")

    def fails(**options: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    kernels.TritonOps = fails
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    with pytest.raises(ConfigError, match=r"Failed to find C compiler.*install a C compiler and Python's headers"):
        choose_ops("fused", torch.device("cuda"))
