"""`batch_invariant` of the fused backend: equal bits for a token however its step is put together, in Triton's interpreter.

The same functions run on a GPU, where products of other tiles would differ.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llama_core.backends.fused.device import StepDevice, choose_ops
from llama_core.backends.parallel import Parallel, alone
from llama_core.backends.weight_formats.matrices import find_weight_format
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.model.weight_formats import QUANTIZED
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row
from tests.llama_core.backends.fused.attention_cases import SHAPES, WIDE_SHAPES, WINDOWS, Case, attended
from tests.support.forking import interpret, prepare_interpreter

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
MODEL = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": -1}


def parts_of(row: Row, generator: np.random.Generator) -> list[Row]:
    """The tokens of a row in several rows: decodes, decodes with drafts, and chunks that do or do not end a prompt."""
    parts, done = [], 0
    while done < row.length:
        length = int(generator.integers(1, 1 + min(9, row.length - done)))
        is_decode = bool(generator.integers(2))
        parts.append(Row(row.slot, row.start + done, length, is_decode, length - 1 if is_decode else 0))
        done += length
    return parts


def check_attention(
    device: torch.device,
    dtype: torch.dtype,
    seeds: Seq[int],
    shapes: Seq[tuple[int, int, int, int]] = SHAPES,
    *,
    windows: Seq[int] = WINDOWS,
    is_float8: bool = False,
) -> None:
    """is_float8: of the cache."""
    from llama_core.backends.fused.kernels import TritonOps

    ops = TritonOps(batch_invariant=True)
    for seed in seeds:
        shape, window = shapes[seed % len(shapes)], windows[seed % len(windows)]
        case, generator = Case(seed, shape, dtype, device, is_float8=is_float8), np.random.default_rng(seed)
        got = attended(ops, case, window)
        cut = [part for row in case.rows for part in parts_of(row, generator)]
        assert torch.equal(case.attend(ops, cut, case.q, window), got), ("in other parts", seed, case.rows, cut)
        begin = 0
        for row in case.rows:
            end = begin + row.length
            one = case.attend(ops, [Row(row.slot, row.start, row.length, False)], case.q[begin:end], window)
            assert torch.equal(one, got[begin:end]), ("as a chunk alone", seed, row)
            begin = end


def product_limit(dtype: torch.dtype, inputs: int) -> float:
    """In float32 the roundings of a sum in order add up like a random walk; otherwise the rounding of the result is larger."""
    in_float32 = 2e-5 * math.sqrt(max(1.0, inputs / 1024))
    return {torch.float32: in_float32, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]


def check_products(device: torch.device, dtype: torch.dtype, inputs: int, outputs: int, counts: list[int]) -> None:
    """`counts`: numbers of rows of which each gives the rows of the largest."""
    torch.manual_seed(inputs)
    x = torch.randn(max(counts), inputs).to(device, dtype)
    weight = torch.randn(outputs, inputs) / inputs**0.5
    for name in (str(dtype).removeprefix("torch."), *QUANTIZED):
        make = find_weight_format(name).torch_matrix
        matrix = make(outputs, inputs, dtype, device, batch_invariant=True)
        matrix.set_rows(0, weight.to(device, dtype))
        held: Any = matrix
        dense = held.dequantized().to(dtype) if name in QUANTIZED else held.weight
        whole = matrix.multiply(x)
        assert (whole.double() - F.linear(x.double(), dense.double())).abs().max() <= product_limit(dtype, inputs), name
        for count in counts:
            assert torch.equal(matrix.multiply(x[-count:]), whole[-count:]), (name, count)


def check_texts(parallel: Parallel, folder: Path) -> None:
    """Tokens and log-probabilities of two requests alone, and in a batch that is computed in chunks."""
    # Imported here, because machines with GPUs that run the tests marked cuda may lack what the other tests need.
    from tests.support import checkpoints, on_ranks

    model = str(checkpoints.write(folder, [checkpoints.random_weights(MODEL)], MODEL))
    prompts = [[1, *range(30 + 3 * i, 44 + 4 * i)] for i in range(2)]
    requests = [(prompt, SamplingParams(0.0, max_tokens=3, logprobs=0, ignore_eos=True)) for prompt in prompts]

    def serve(given: list[Any], **settings: Any) -> dict[str, Any]:
        common: dict[str, Any] = {"backend": "fused", "batch_invariant": True, "max_seq_len": 48, "block_size": 2}
        return on_ranks.serve(parallel, model, given, **common | settings)

    single = [serve([request]) for request in requests]
    expected = {key: [run[key][0] for run in single] for key in ("outputs", "logprobs")}
    assert expected["outputs"][0] != expected["outputs"][1]
    found = serve(requests, max_step_tokens=9, arrivals=[0, 2])
    assert {key: found[key] for key in expected} == expected


def interpreted_texts(parallel: Parallel, folder: str) -> None:
    from llama_core.backends.fused.kernels import TritonOps

    prepare_interpreter()
    with patch(
        "llama_core.backends.rank_loading.choose_ops",
        lambda kind, device, **options: (TritonOps(**options), StepDevice(device)),
    ):
        check_texts(parallel, Path(folder))


def run_interpreted(statement: str) -> None:
    """Run a statement with this module's names where Triton interprets kernels."""
    interpret(f"import torch\nfrom {__name__} import *\n{statement}")


@pytest.mark.parametrize(
    ("dtype", "seeds"),
    [
        ("float32", "range(2)"),
        ("float16", "[6]"),
        ("float16", "[7], is_float8=True"),
        ("float16", "[3, 5], windows=[-40]"),
        pytest.param("float32", "range(2, 6)", marks=pytest.mark.full),
        pytest.param("float16", "range(8, 12), is_float8=True", marks=pytest.mark.full),
    ],
)
def test_attention_of_a_token_is_the_same_in_a_decode_with_drafts_and_in_any_chunk(dtype: str, seeds: str) -> None:
    run_interpreted(f"check_attention(torch.device('cpu'), torch.{dtype}, {seeds})")


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs", "counts"),
    [
        ("float32", 1100, 40, [1, 17]),
        ("float16", 75, 33, [1, 70]),
        pytest.param("float16", 1100, 130, [1, 64, 65], marks=pytest.mark.full),
    ],
)
def test_a_row_of_a_product_is_the_same_beside_any_number_of_rows(
    dtype: str, inputs: int, outputs: int, counts: list[int]
) -> None:
    run_interpreted(f"check_products(torch.device('cpu'), torch.{dtype}, {inputs}, {outputs}, {counts})")


def test_texts_are_the_same_alone_and_in_a_batch_in_chunks(tmp_path: Path) -> None:
    run_interpreted(f"interpreted_texts(alone('cpu'), {str(tmp_path)!r})")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attention_and_products_have_the_same_bits_on_a_gpu(dtype: torch.dtype) -> None:
    check_attention(torch.device("cuda"), dtype, range(40))
    check_attention(torch.device("cuda"), dtype, range(20), WIDE_SHAPES)
    check_attention(torch.device("cuda"), dtype, range(20), is_float8=True)
    for inputs, outputs in ((4096, 4096), (14336, 4096), (4096, 28672), (2048, 640)):
        check_products(torch.device("cuda"), dtype, inputs, outputs, [1, 2, 7, 63, 64, 65, 200, 512, 2048])


def summed(parallel: Any, counts: list[int]) -> list[list[int]]:
    """For each number of rows: the bits of the first rows' sums over the ranks."""
    generator = torch.Generator().manual_seed(parallel.rank)
    part = torch.randn(max(counts), 24, generator=generator).bfloat16()
    return [parallel.sum_in_rank_order(part[:count])[0].view(torch.int16).tolist() for count in counts]


def test_ranks_add_their_parts_in_float32_in_the_order_of_ranks(ranks: Callable[[int], Any]) -> None:
    parts = [torch.randn(9, 24, generator=torch.Generator().manual_seed(rank)).bfloat16().float() for rank in range(3)]
    expected = ((parts[0] + parts[1]) + parts[2]).bfloat16()[0].view(torch.int16).tolist()
    for found in ranks(3).call(summed, [1, 4, 9]):
        assert found == [expected] * 3


def test_a_backend_that_cannot_be_batch_invariant_refuses_to_start() -> None:
    from tests.conftest import GOLDEN
    from tests.support import on_ranks

    config: dict[str, Any] = {"max_seq_len": 32, "max_batch_size": 2, "batch_invariant": True}
    mp1 = str(GOLDEN / "mp1")
    with pytest.raises(ConfigError, match="batch_invariant needs a GPU with the fused backend") as refused:
        on_ranks.new_runner(alone("cpu"), mp1, backend="torch", **config)
    assert refused.value.param == "batch_invariant"
    with pytest.raises(ConfigError, match="needs a GPU with the fused backend"):
        choose_ops("fused", torch.device("cpu"), batch_invariant=True)
    assert on_ranks.new_runner(alone("cpu"), mp1, backend="native", **config).backend.name.startswith("native")
    assert EngineConfig("", 1, 2, 1).batch_invariant is False
