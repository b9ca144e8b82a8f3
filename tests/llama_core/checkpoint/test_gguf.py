"""GGUF models written by the gguf package are loaded with the values of that package, on any number of ranks."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from llama_core.checkpoint.registry import checkpoint_path, open_checkpoint
from llama_core.errors import CheckpointError, ConfigError
from llama_core.files.generation_config import RecommendedSampling, read_recommended_sampling
from llama_core.files.gguf.types import ENCODINGS
from llama_core.files.source import WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.rope import RopeConfig
from llama_core.model.share import RankShare
from llama_core.model.weights import weight_specs
from llama_core.text.template.files import template_files
from tests.support.gguf_models import HEAD, VOCABULARY, write_model
from tests.support.rank_weights import rank_weights

QUANTIZED = [Encoding[each.name] for each in ENCODINGS.values()]


def _load(path: Path, rank: int = 0, world_size: int = 1) -> tuple[WeightReader, ModelConfig, dict[str, torch.Tensor]]:
    source = open_checkpoint(path)
    config = source.model_config(VOCABULARY)
    reader = source.open_weights(config)
    share = RankShare.of(config, rank, world_size)
    weights = dict(rank_weights(reader, config, share, torch.float32))
    return reader, config, weights


def _reference(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file, read by the gguf package."""
    return {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        ).reshape(tuple(reversed(tensor.shape.tolist())))
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("encoding", QUANTIZED, ids=lambda encoding: encoding.name)
def test_every_encoding_has_the_values_of_the_gguf_package(tmp_path: Path, encoding: Encoding) -> None:
    path = write_model(tmp_path, encoding=encoding)
    _, config, weights = _load(path)
    reference = _reference(path)
    for name, spec in weight_specs(config).items():
        assert torch.equal(weights[name], reference[spec.gguf]), name


@pytest.mark.parametrize("encoding", [Encoding.F16, Encoding.Q4_1, Encoding.Q6_K], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_parts_of_all_ranks_make_the_whole(tmp_path: Path, encoding: Encoding, world_size: int) -> None:
    path = write_model(tmp_path, encoding=encoding)
    _, config, whole = _load(path)
    for rank in range(world_size):
        share = RankShare.of(config, rank, world_size)
        _, _, weights = _load(path, rank, world_size)
        for name, spec in weight_specs(config).items():
            start, shape = spec.part(share)
            region = tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
            assert torch.equal(weights[name], whole[name][region]), name


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_heads_in_halves_become_adjacent_pairs(tmp_path: Path, architecture: str) -> None:
    path = write_model(tmp_path, architecture, bias=architecture == "qwen2")
    reader, config, weights = _load(path)
    reference = _reference(path)
    order = torch.arange(HEAD).view(2, -1).T.flatten()  # 0, half, 1, half + 1, ...
    for name, spec in weight_specs(config).items():
        weight, stored = weights[name], reference[spec.gguf]
        if ".wq." in name or ".wk." in name or "q_norm" in name or "k_norm" in name:
            assert torch.equal(weight, stored.unflatten(0, (-1, HEAD))[:, order].flatten(0, 1)), name
        else:
            assert torch.equal(weight, stored), name
    assert ("layers.0.attention.q_norm.weight" in weights) == (architecture == "qwen3")
    assert ("layers.0.attention.wq.bias" in weights) == (architecture == "qwen2")
    assert reader.dtype is torch.float32


def test_a_split_model_equals_the_whole(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    _, _, expected = _load(write_model(whole))
    first = write_model(split, split=7)
    source = open_checkpoint(first)
    assert source.num_shards() == 1 and len(source.files) > 2 and all(file.exists() for file in source.files)
    _, _, found = _load(first)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert source.owns("m-00002-of-00009.gguf") and not source.owns("other-00001-of-00002.gguf")


def test_parts_of_a_split_model_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write_model(tmp_path, split=7)
    parts = list(open_checkpoint(first).files)
    with pytest.raises(CheckpointError, match=r"00003-of.*a later part.*set ckpt_dir to m-00001-of-00003\.gguf"):
        open_checkpoint(parts[2])
    last = parts[-1].read_bytes()
    parts[-1].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=parts[-1].name):
        open_checkpoint(first).num_shards()
    parts[-1].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[-1].name}: cannot be read"):
        open_checkpoint(first).num_shards()
    parts[-1].write_bytes(last)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"renamed\.gguf: is one of \d+ parts"):
        open_checkpoint(renamed).num_shards()


def _config(directory: Path, architecture: str = "llama", **keys: Any) -> ModelConfig:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    return open_checkpoint(write_model(directory, architecture, keys=changed)).model_config(VOCABULARY)


def test_the_configuration_is_read(tmp_path: Path) -> None:
    config = _config(tmp_path, rope__freq_base=5e5, context_length=4096, attention__sliding_window=64)
    assert (config.dim, config.n_layers, config.n_heads, config.n_kv_heads) == (256, 2, 8, 4)
    assert (config.head_dim, config.hidden_dim, config.vocab_size) == (HEAD, 256, VOCABULARY)
    assert config.rope == RopeConfig(theta=5e5) and config.context_length == 4096 and config.windows == (64, 64)


def _scaled(directory: Path, **keys: Any) -> ModelConfig:
    return _config(directory, **{f"rope__scaling__{key}": value for key, value in keys.items()})


def test_rope_scaling_has_llama_cpps_defaults(tmp_path: Path) -> None:
    assert _scaled(tmp_path / "1", factor=4.0).rope == RopeConfig("linear", 10000.0, 4.0)
    none = _config(tmp_path / "2", rope__scaling__type="none", rope__scale_linear=4.0, rope__scaling__factor=2.0)
    assert none.rope == RopeConfig()
    yarn = {"type": "yarn", "factor": 4.0}
    assert _scaled(tmp_path / "3", **yarn).rope.original_context == 512, "the context, where the file does not say"
    multiplied = _scaled(tmp_path / "4", **yarn, yarn_attn_factor=2.0, attn_factor=0.25, yarn_ext_factor=1.0)
    assert multiplied.rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_the_factors_of_llama_3_1_are_recognized(tmp_path: Path) -> None:
    """The converter's formula, in its own terms of wavelengths."""
    factors = []
    for pair in range(HEAD // 2):
        wavelength = 2 * np.pi * 500_000 ** (2 * pair / HEAD)
        smooth = (8192 / wavelength - 1) / 3
        middle = 1 / ((1 - smooth) / 8 + smooth)
        factors.append(1 if wavelength < 2048 else 8 if wavelength > 8192 else middle)
    keys = {"rope.freq_base": 500_000.0}
    path = write_model(tmp_path, keys=keys, more={"rope_freqs.weight": np.array(factors, np.float32)})
    _, config, _ = _load(path)
    assert config.rope == RopeConfig("llama3", 500_000.0, 8.0, original_context=8192)
    factors[3] *= 1.01
    path = write_model(tmp_path, keys=keys, more={"rope_freqs.weight": np.array(factors, np.float32)})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        _load(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, "field 'num_experts_per_tok' is missing"),
        ({"rope.dimension_count": 16}, "rope.dimension_count must be the width 32"),
        ({"attention.value_length": 16}, "attention.value_length must be the key length 32"),
        ({"feed_forward_length": [128, 256]}, "feed_forward_length must be a positive integer"),
        ({"block_count": 0}, "block_count must be a positive integer"),
        ({"block_count": "2"}, "block_count must be a positive integer"),
        ({"attention.head_count_kv": 3}, "not divisible"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon must be a positive finite"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": 6}, "sliding_window_pattern must be 2"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"rope.freq_base": 1.0}, "rope theta must be more than 1"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1e-30}, "rope factor must be from 1e-06"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 1e30}, "rope factor must be from 1e-06"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, "scaling.yarn_log_multiplier is 0.1"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.0}, "scaling.yarn_ext_factor is 0.0"),
        ({"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 2.0}, "scaling.attn_factor is 2.0"),
        ({"rope.scaling.of_tomorrow": 1.0}, "scaling.of_tomorrow is 1.0"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_key(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = write_model(tmp_path, keys=keys)
    with pytest.raises(ConfigError, match=message) as refused:
        open_checkpoint(path).model_config(VOCABULARY)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("more", "without", "message"),
    [
        ({"blk.0.attn_q.extra": np.ones(4, np.float32)}, (), "'blk.0.attn_q.extra' is unexpected"),
        ({}, ("blk.1.ffn_norm.weight",), "blk.1.ffn_norm.weight is missing"),
        ({"output_norm.weight": np.ones(5, np.float32)}, (), r"output_norm.weight has shape \[5\], expected \[256\]"),
        ({"blk.0.attn_q.bias": np.ones(256, np.float32)}, (), "blk.0.attn_k.bias is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, more: dict[str, Any], without: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _load(write_model(tmp_path, more=more, without=without))


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    path = write_model(tmp_path, split=7)
    assert checkpoint_path(tmp_path) == path
    assert list(open_checkpoint(tmp_path).files) == list(open_checkpoint(path).files)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"2 GGUF models: set ckpt_dir to one of m-00001-of-\d+\.gguf, other\.gguf"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").touch()
    assert checkpoint_path(tmp_path) == tmp_path


def test_nothing_beside_a_gguf_file_is_read(tmp_path: Path) -> None:
    path = write_model(tmp_path, plain={"tokenizer.ggml.eos_token_id": 2})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.5}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 8}')
    assert open_checkpoint(path).stop_ids == {2}
    assert read_recommended_sampling(path) == RecommendedSampling()
    assert template_files(path) == []
