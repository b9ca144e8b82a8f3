"""Weight formats: found by name, and refused by name where nothing computes with them."""

from typing import Any

import pytest
import torch

from deployments.args import ServerArgs
from llama_core.backends.parallel import alone
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from tests.conftest import GOLDEN
from tests.support import checkpoints, on_ranks

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": -1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write(tmp_path_factory.mktemp("formats"), [checkpoints.random_weights(SHAPE)], SHAPE))


def test_an_unknown_quantization_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, int8") as refused:
        EngineConfig("there", 640, 64, 2, quantization="int3")
    assert refused.value.param == "quantization"
    with pytest.raises(ValueError, match="quantization\n  Input should be 'auto', 'none', 'int8'"):
        ServerArgs(quantization="int3")


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
