"""Weight formats: found by name, planned and held at their own size, and refused by name where nothing computes with them."""

from typing import Any

import pytest
import torch

from deployments.args import ServerArgs
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution.memory_budget import planned_weight_bytes
from llama_core.execution.native.backend import NativeBackend
from llama_core.execution.native.library import load_library
from llama_core.execution.parallel import alone
from llama_core.execution.weight_formats.registry import QUANTIZED
from llama_core.execution.weight_plan import WeightPlan, plan_weights
from llama_core.model_config import ModelConfig
from tests.conftest import GOLDEN
from tests.support import checkpoints, on_ranks

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": -1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write(tmp_path_factory.mktemp("formats"), [checkpoints.random_weights(SHAPE)], SHAPE))


def plan(config: ModelConfig, dtype: str, quantization: str) -> WeightPlan:
    return plan_weights(config, lambda name: "dense", quantization, dtype, 1)


def test_an_unknown_quantization_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, int8") as refused:
        EngineConfig("there", 640, 64, 2, quantization="int3")
    assert refused.value.param == "quantization"
    with pytest.raises(ValueError, match="must be one of auto, none, int8"):
        ServerArgs(quantization="int3")


def test_the_native_engine_refuses_a_weight_format_without_kernels() -> None:
    def reason(is_bfloat16: bool, weights: bytes, widest: int = 64) -> Any:
        return load_library().llama_unsupported_reason(64, widest, is_bfloat16, weights)

    assert (
        reason(True, b"bfloat16")
        is reason(False, b"float32")
        is reason(True, b"int8")
        is reason(False, b"int8")
        is None
    )
    assert b"no kernels for such weights" in reason(True, b"float32")
    assert b"no kernels for such weights" in reason(False, b"no-such-format")
    assert b"more inputs" in reason(True, b"int8", 70_000)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("float32", "none"),
        ("bfloat16", "none"),
        ("bfloat16", "int8"),
        ("bfloat16", "int8_groups"),
        ("float32", "int4"),
        ("bfloat16", "int4_min"),
    ],
)
def test_planned_bytes_are_those_that_the_native_engine_takes_without_padding(
    model: str, dtype: str, quantization: str
) -> None:
    runner = on_ranks.build(alone("cpu"), model, dtype, quantization=quantization).runner
    assert isinstance(runner.backend, NativeBackend)
    planned = planned_weight_bytes(runner.model_config, plan(runner.model_config, dtype, quantization), alone("cpu"))
    held = runner.backend.weight_bytes
    layers = runner.model_config.n_layers * 4 + 2
    assert planned * 0.98 <= held <= planned * 1.1 + layers * 2 * 4096


def test_an_fp8_cache_takes_a_byte_a_value_and_changes_logits_little(model: str) -> None:
    tokens = [1, *range(5, 40)]
    settings: dict[str, Any] = {"backend": "torch", "quantization": "none"}
    runners = [
        on_ranks.build(alone("cpu"), model, "float32", **settings, **cache).runner
        for cache in ({}, {"kv_cache_dtype": "fp8"})
    ]
    assert runners[0].backend.cache_block_bytes == 4 * runners[1].backend.cache_block_bytes
    plain, small = (
        torch.tensor(on_ranks.last_logits(alone("cpu"), model, tokens, [30, 5, 1], **settings, **cache))
        for cache in ({}, {"kv_cache_dtype": "fp8"})
    )
    assert 0 < (small - plain).std() < 0.2 * plain.std()
    parts = torch.tensor(on_ranks.last_logits(alone("cpu"), model, tokens, [36], **settings, kv_cache_dtype="fp8"))
    assert (parts - small).std() < 0.02 * plain.std(), "a chunk reads its own keys from the cache too"


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_quantized_weights_are_held_in_torch_as_planned(model: str, quantization: str) -> None:
    tokens = [1, *range(5, 40)]
    runner = on_ranks.build(alone("cpu"), model, "float32", backend="torch", quantization=quantization).runner
    planned = planned_weight_bytes(
        runner.model_config, plan(runner.model_config, "float32", quantization), alone("cpu")
    )
    assert planned <= runner.backend.weight_bytes <= planned * 1.05
    got, dense = (
        torch.tensor(on_ranks.last_logits(alone("cpu"), model, tokens, [30, 5, 1], backend="torch", **settings))
        for settings in ({"quantization": quantization}, {"quantization": "none"})
    )
    assert 0 < (got - dense).std() < (0.8 if quantization.startswith("int4") else 0.2) * dense.std()


@pytest.mark.parametrize(
    ("backend", "setting", "message"),
    [
        ("auto", "quantization", "needs a GPU, or the native backend, which cannot be used .*backend: torch has it"),
        ("native", "quantization", "the native backend cannot be used: .*no kernels for such weights"),
        ("auto", "kv_cache_dtype", "needs a GPU, or the native backend, which cannot be used .*backend: torch has it"),
        ("native", "kv_cache_dtype", "the native backend cannot be used: it has no cache in fp8"),
    ],
)
def test_fp8_is_refused_where_it_would_be_slow_unless_torch_is_asked_for(
    backend: str, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks.build(alone("cpu"), str(GOLDEN / "mp1"), "float32", backend=backend, **{setting: "fp8"})
