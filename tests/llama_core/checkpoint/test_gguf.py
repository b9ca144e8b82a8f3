"""GGUF models written by the gguf package are loaded with the values of that package, on any number of ranks."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from llama_core import Llama
from llama_core.checkpoint.digest import sha256_of
from llama_core.checkpoint.generation_config import RecommendedSampling, read_recommended_sampling
from llama_core.checkpoint.gguf_config import gguf_config, stop_ids
from llama_core.checkpoint.gguf_model import GgufModel
from llama_core.checkpoint.gguf_names import gguf_name
from llama_core.checkpoint.gguf_types import ENCODINGS
from llama_core.checkpoint.loader import rank_weights
from llama_core.checkpoint.manifest import Manifest
from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.registry import checkpoint_path, open_checkpoint
from llama_core.checkpoint.source import DENSE, WeightReader
from llama_core.checkpoint.weights import Box, is_linear, weight_specs
from llama_core.errors import CheckpointError, ConfigError
from llama_core.model_config import ModelConfig, RopeConfig
from llama_core.text.template.files import template_files
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.gguf_files import write_gguf
from tests.support.gguf_models import HEAD, KEYS, VOCABULARY, write_model

QUANTIZED = [Encoding[each.name] for each in ENCODINGS.values()]


def _load(path: Path, rank: int = 0, world_size: int = 1) -> tuple[WeightReader, ModelConfig, dict[str, torch.Tensor]]:
    source = open_checkpoint(path)
    config = source.model_config(VOCABULARY)
    reader = source.open_weights(config)
    share = RankShare.of(config, rank, world_size)
    weights = dict(rank_weights(reader, config, share, torch.float32, torch.device("cpu")))
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
    _, _, weights = _load(path)
    reference = _reference(path)
    for name, weight in weights.items():
        assert torch.equal(weight, reference[gguf_name(name)]), name


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


@pytest.mark.parametrize(
    ("encoding", "stored"),
    [(Encoding.Q8_0, "int8_groups"), (Encoding.Q4_0, "int4"), (Encoding.Q4_1, "int4_min"), (Encoding.Q4_K, DENSE)],
)
def test_groups_as_stored_have_the_values_of_the_dense_weight(tmp_path: Path, encoding: Encoding, stored: str) -> None:
    reader, config, weights = _load(write_model(tmp_path, encoding=encoding))
    for name, spec in weight_specs(config).items():
        if not is_linear(name):
            continue
        assert reader.stored_format(name) == stored
        if stored == DENSE:
            with pytest.raises(LookupError):
                next(iter(reader.grouped_slices(name, Box((0, 0), spec.shape))))
            continue
        rows, columns = spec.shape
        box = Box((1, 32), (rows - 1, columns - 32))
        dense = torch.full(box.shape, torch.nan)
        for part in reader.grouped_slices(name, box):
            assert part.codes.dtype is (torch.int8 if stored == "int8_groups" else torch.uint8)
            assert torch.equal(part.scales, part.scales.half().float())
            codes = part.codes.float() - (8 if stored == "int4" else 0)
            values = codes.unflatten(1, (-1, 32)) * part.scales[..., None]
            if part.minima is not None:
                values += part.minima[..., None]
            dense[part.start[0] : part.start[0] + len(codes), part.start[1] :] = values.flatten(1)
        assert torch.equal(dense, weights[name][1:, 32:]), name


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_heads_in_halves_become_adjacent_pairs(tmp_path: Path, architecture: str) -> None:
    path = write_model(tmp_path, architecture, bias=architecture == "qwen2")
    reader, config, weights = _load(path)
    reference = _reference(path)
    order = torch.arange(HEAD).view(2, -1).T.flatten()  # 0, half, 1, half + 1, ...
    for name, weight in weights.items():
        stored = reference[gguf_name(name)]
        if ".wq." in name or ".wk." in name or "q_norm" in name or "k_norm" in name:
            assert torch.equal(weight, stored.unflatten(0, (-1, HEAD))[:, order].flatten(0, 1)), name
        else:
            assert torch.equal(weight, stored), name
    assert config.qk_norm == (architecture == "qwen3") and config.attention_bias == (architecture == "qwen2")
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


@pytest.mark.parametrize(
    ("encodings", "dtype"),
    [
        (Encoding.F32, torch.float32),
        (Encoding.F16, torch.float16),
        (Encoding.BF16, torch.bfloat16),
        ({"blk.1.ffn_up.weight": Encoding.Q8_0}, torch.bfloat16),
        ({"token_embd.weight": Encoding.Q8_0}, torch.float32),
    ],
)
def test_the_dtype_is_that_of_the_linear_layers(tmp_path: Path, encodings: Any, dtype: torch.dtype) -> None:
    path = write_model(tmp_path, encoding=encodings)
    source = open_checkpoint(path)
    assert source.open_weights(source.model_config(VOCABULARY)).dtype is dtype


def test_a_model_without_an_output_layer_is_tied(tmp_path: Path) -> None:
    _, config, weights = _load(write_model(tmp_path, tied=True))
    assert config.tied_embeddings and torch.equal(weights["output.weight"], weights["tok_embeddings.weight"])


def _config(directory: Path, architecture: str = "llama", **keys: Any) -> ModelConfig:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    return open_checkpoint(write_model(directory, architecture, keys=changed)).model_config(VOCABULARY)


def test_the_configuration_is_read(tmp_path: Path) -> None:
    config = _config(tmp_path, rope__freq_base=5e5, context_length=4096, attention__sliding_window=64)
    assert (config.dim, config.n_layers, config.n_heads, config.n_kv_heads) == (256, 2, 8, 4)
    assert (config.head_dim, config.hidden_dim, config.vocab_size) == (HEAD, 256, VOCABULARY)
    assert config.rope == RopeConfig(theta=5e5) and config.context_length == 4096 and config.windows == (64, 64)


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    linear = _config(tmp_path / "1", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.rope == RopeConfig("linear", 10000.0, 4.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    config = _config(tmp_path / "2", "qwen2", **{f"rope__scaling__{key}": value for key, value in yarn.items()})
    assert config.rope.kind == "yarn" and config.rope.original_context == 128
    assert config.rope.attention_factor == pytest.approx(1 + 0.1 * np.log(4))
    with pytest.raises(ConfigError, match=r"rope\.scaling\.type is 'longrope'"):
        _config(tmp_path / "3", rope__scaling__type="longrope")


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


def test_yarn_stretches_a_context_that_does_not_exceed_the_original_one(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert _scaled(tmp_path / "1", **yarn, original_context_length=512).context_length == 2048
    assert _scaled(tmp_path / "2", **yarn, original_context_length=256).context_length == 512


def test_a_context_from_a_file_is_capped(tmp_path: Path) -> None:
    assert _config(tmp_path, context_length=2**31 - 1, attention__sliding_window=16).context_length == 2**24


def test_ill_typed_metadata_is_refused_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GgufModel(write_model(tmp_path))
    monkeypatch.setattr(GgufModel, "metadata", {"general.architecture": ["llama"]})
    with pytest.raises(ConfigError, match=r"m\.gguf: the architecture \['llama'\] is not supported"):
        gguf_config(model, VOCABULARY)
    for count in ("2", [1], 1.0, True, -1):
        monkeypatch.setattr(GgufModel, "metadata", {"split.count": count})
        with pytest.raises(CheckpointError, match=r"m\.gguf: split\.count must be the number of parts"):
            _ = model.tensors


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
        ({"expert_count": 8}, "expert_count is 8"),
        ({"rope.dimension_count": 16}, "rope.dimension_count must be the width 32"),
        ({"attention.value_length": 16}, "attention.value_length must be the key length 32"),
        ({"feed_forward_length": [128, 256]}, "feed_forward_length must be a whole number"),
        ({"block_count": 0}, "block_count must be a whole number from 1"),
        ({"block_count": "2"}, "block_count must be a whole number"),
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


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the architecture 'mistral3' is not supported; supported are llama, qwen2"):
        open_checkpoint(write_model(tmp_path, "mistral3")).model_config(VOCABULARY)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has {VOCABULARY} rows, but the tokenizer has {VOCABULARY + 1}"):
        open_checkpoint(write_model(tmp_path)).model_config(VOCABULARY + 1)


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


def test_the_ids_that_end_a_text_are_read(tmp_path: Path) -> None:
    names = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("eos", 2), ("eot", 5), ("bos", 1))}
    path = write_model(tmp_path, plain=names)
    assert open_checkpoint(path).stop_ids == stop_ids(GgufModel(path)) == {2, 5}


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


def test_the_keys_of_the_small_model_are_those_of_converted_ones() -> None:
    """The names in the gguf package, from which llama.cpp's converter takes them."""
    known = {value.replace("{arch}.", "") for group in vars(gguf.Keys).values() if isinstance(group, type)
             for value in vars(group).values() if isinstance(value, str)}  # fmt: skip
    assert known.issuperset(KEYS)


def test_a_gguf_file_gives_the_tokens_of_the_same_weights_in_metas_format(tmp_path: Path) -> None:
    weights = random_weights(WIDE)
    meta = write(tmp_path / "meta", split(weights, 2))
    config = open_checkpoint(meta).model_config(640)
    keys = {
        "block_count": config.n_layers,
        "embedding_length": config.dim,
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.head_dim,
    }
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        {f"llama.{key}": value for key, value in keys.items()},
        {gguf_name(name): weight.numpy() for name, weight in weights.items()},
    )
    outputs = [
        Llama.build(each, meta / "tokenizer.model", 32, 2, device="cpu", backend="torch").generate(
            [[1, 5, 7]], 16, temperature=0
        )
        for each in (meta, path)
    ]
    assert outputs[0] == outputs[1]


def test_the_manifest_of_a_file_lies_beside_it(tmp_path: Path) -> None:
    path, other = write_model(tmp_path), write_model(tmp_path / "other")
    source = open_checkpoint(path)
    entries = f"{sha256_of(path)}  m.gguf\n{'0' * 64}  another.gguf\n"
    (tmp_path / "SHA256SUMS").write_text(entries)
    manifest = Manifest.find(path)
    assert manifest is not None
    manifest.check_complete(source)
    manifest.verify(source.files)
    path.write_bytes(other.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"m\.gguf: its SHA-256 is"):
        manifest.verify(source.files)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read: No such file"):
        open_checkpoint(tmp_path / "none.gguf").num_shards()
