"""The fields of params.json, the world sizes of a model, the settings of an engine."""

import math
from pathlib import Path
from typing import Any

import pytest

from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.files.meta_params import config_from_params, read_params
from llama_core.model.config import ModelConfig

LLAMA2_7B = {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1}


def config(**changes: Any) -> ModelConfig:
    return config_from_params(LLAMA2_7B | changes, vocab_size=32000)


@pytest.mark.parametrize(
    ("changes", "hidden", "kv_heads"),
    [
        ({}, 11008, 32),
        ({"dim": 5120, "n_heads": 40, "n_layers": 40}, 13824, 40),
        ({"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8}, 28672, 8),
    ],
    ids=["7B", "13B", "70B"],
)
def test_published_models_have_their_published_widths(changes: dict[str, Any], hidden: int, kv_heads: int) -> None:
    model = config(**changes)
    assert (model.hidden_dim, model.n_kv_heads, model.vocab_size, model.rope.theta) == (hidden, kv_heads, 32000, 1e4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dim", -4096), ("dim", 0), ("dim", "4096"), ("dim", 4096.0), ("dim", True), ("n_layers", 10**12),
        ("norm_eps", math.nan), ("norm_eps", -1e-5), ("norm_eps", math.inf), ("rope_theta", 0), ("ffn_dim_multiplier", "1.3"),
        ("n_kv_heads", 0), ("multiple_of", -1), ("vocab_size", 0), ("vocab_size", -2),
        # These would overflow, or list the weights of two billion layers.
        ("norm_eps", 10**400), ("rope_theta", -(10**400)), ("ffn_dim_multiplier", 10**400), ("ffn_dim_multiplier", 1e308),
        ("ffn_dim_multiplier", 1e-300), ("multiple_of", 2**31 - 1), ("n_layers", 2**31 - 1),
    ],
)  # fmt: skip
def test_an_invalid_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        config(**{field: value})


def test_a_missing_and_an_unknown_field_are_named() -> None:
    with pytest.raises(ConfigError, match="n_layers"):
        config_from_params({k: v for k, v in LLAMA2_7B.items() if k != "n_layers"}, vocab_size=32000)
    with pytest.raises(ConfigError, match="n_layer'"):
        config(n_layer=3)
    with pytest.raises(ConfigError, match="use_scaled_rope"):
        config(use_scaled_rope=1)
    assert config(use_scaled_rope=False, max_seq_len=2048).dim == 4096


def test_a_vocabulary_of_another_size_than_the_tokenizers_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"32016.*32000"):
        config(vocab_size=32016)


def test_dimensions_that_do_not_divide_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_heads 33"):
        config(n_heads=33)
    with pytest.raises(ConfigError, match="n_kv_heads 5"):
        config(n_kv_heads=5)
    with pytest.raises(ConfigError, match="even"):
        config(dim=32 * 3, n_heads=32)


def test_the_scaled_rope_of_metas_files_is_that_of_its_release() -> None:
    rope = config(use_scaled_rope=True, rope_theta=500000.0).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_context) == ("llama3", 500000.0, 8.0, 8192)
    assert config(dim=2048, use_scaled_rope=True).rope.factor == 32.0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"dim": NaN}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 6000],
)
def test_a_params_file_that_is_missing_or_has_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"params\.json: no such file"):
        read_params(tmp_path, vocab_size=640)
    (tmp_path / "params.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"params\.json"):
        read_params(tmp_path, vocab_size=640)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_seq_len", 0), ("max_batch_size", -1), ("device", "tpu"), ("dtype", "int4"), ("kv_cache_bytes", 0),
     ("max_step_tokens", 3)],
)  # fmt: skip
def test_an_invalid_engine_setting_is_named(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"ckpt_dir": "x", "vocab_size": 640, "max_seq_len": 64, "max_batch_size": 4}
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**fields | {field: value})
