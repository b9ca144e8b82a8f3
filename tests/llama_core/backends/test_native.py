"""The native backend: all-gathers, values that are not finite, and where it is unavailable."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_core import Llama
from llama_core.backends.native import backend, build, library
from llama_core.backends.native.all_gather import shared_memory
from llama_core.backends.parallel import Parallel, alone
from llama_core.errors import ConfigError, NonFiniteLogits
from llama_core.model.weight_formats import QUANTIZED
from tests.conftest import GOLDEN
from tests.support import checkpoints, on_ranks

PROMPT = [1] + [3 + i * 37 % 600 for i in range(90)]
# 4 heads of 64 dimensions on 2 key/value heads: whole register tiles.
SHAPE = checkpoints.WIDE | {"dim": 256, "n_heads": 4, "n_kv_heads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights = checkpoints.random_weights(SHAPE, scale=0.075)
    return str(checkpoints.write(tmp_path_factory.mktemp("native"), [weights], SHAPE))


def logits_by_gloo_fallback(parallel: Parallel, model: str) -> Any:
    """As on ranks of different nodes: no shared memory."""
    vars(backend)["shared_memory"] = lambda parallel, num_bytes: None
    try:
        return on_ranks.last_logits(parallel, model, PROMPT[:60], [30, 29, 1], max_seq_len=150)
    finally:
        vars(backend)["shared_memory"] = shared_memory


def logits_by_shared_memory(parallel: Parallel, model: str) -> Any:
    return on_ranks.last_logits(parallel, model, PROMPT[:60], [30, 29, 1], max_seq_len=151)


def test_ranks_gather_the_same_values_through_gloo_as_through_shared_memory(ranks: Any, model: str) -> None:
    assert ranks(2).call(logits_by_gloo_fallback, model) == ranks(2).call(logits_by_shared_memory, model)


@pytest.fixture
def fresh_build() -> Iterator[None]:
    """library_path and the library loaded from it are remembered for the process."""
    remembered = build.library_path, library.load_library
    build.library_path.cache_clear()
    library.load_library.cache_clear()
    yield
    build.library_path.cache_clear()
    library.load_library.cache_clear()
    assert remembered == (build.library_path, library.load_library)


@pytest.mark.usefixtures("fresh_build")
def test_without_a_compiler_torch_computes_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLAMA_CXX", "no-such-compiler")
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path))
    mp1 = GOLDEN / "mp1"
    with caplog.at_level(logging.WARNING, logger="llama_core"):
        llama = Llama.build(mp1, mp1 / "tokenizer.model", 64, 2)
    assert llama.runner.backend.name == "torch"
    assert "no C++ compiler (no-such-compiler)" in caplog.text
    with pytest.raises(ConfigError, match="native backend cannot be used: there is no C"):
        Llama.build(mp1, mp1 / "tokenizer.model", 64, 2, backend="native")
    with pytest.raises(ConfigError, match="quantization int8 needs a GPU, or the native backend"):
        Llama.build(mp1, mp1 / "tokenizer.model", 64, 2, quantization="int8")


@pytest.mark.usefixtures("fresh_build")
def test_a_library_is_not_loaded_from_a_directory_that_others_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path))
    with pytest.raises(build.Unavailable, match="belongs to this user alone"):
        build.library_path()


@pytest.mark.parametrize("quantization", ["none", *(name for name in QUANTIZED if name != "fp8")])
def test_a_value_that_is_not_finite_is_reported_and_not_rounded_away(tmp_path: Path, quantization: str) -> None:
    weights = checkpoints.random_weights(SHAPE)
    for name in ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight"):
        weights[name] = weights[name] * 1e30  # their product overflows float32
    directory = str(checkpoints.write(tmp_path, [weights], SHAPE))
    with pytest.raises(NonFiniteLogits):
        on_ranks.build(alone("cpu"), directory, "float32", backend="native", quantization=quantization)
