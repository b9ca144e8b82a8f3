"""Conversion in both directions keeps every value, and the other library reads what was written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cli.main import app
from llama_core.checkpoint.loader import rank_weights
from llama_core.checkpoint.manifest import Manifest
from llama_core.checkpoint.meta_params import config_from_params
from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.checkpoint.weights import Box, weight_specs
from llama_core.convert import conversion, hugging_face, meta, safetensors_writer
from llama_core.convert.conversion import convert
from llama_core.convert.quantized import is_quantized
from llama_core.errors import CheckpointError, ConfigError, LlamaError
from llama_core.execution.weight_formats.quantize import quantize_groups
from llama_core.model_config import ModelConfig
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.hugging_face import CONFIGS, in_hugging_faces_layout, random_weights, read, write
from tests.support.vocabularies import make_family

SOURCE = GOLDEN / "mp2"
IDS = 640


def weights_of(folder: Path, num_ids: int = IDS) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    source = open_checkpoint(folder)
    config = source.model_config(num_ids)
    reader = source.open_weights(config)
    share = RankShare.of(config, 0, 1)
    return config, dict(rank_weights(reader, config, share, reader.dtype, torch.device("cpu")))


def test_meta_to_hugging_face_and_back_keeps_every_weight(tmp_path: Path) -> None:
    folder, back = tmp_path / "hf", tmp_path / "meta"
    seen: list[tuple[int, int]] = []
    converted = convert(SOURCE, folder, "hf", 2, on_progress=lambda *at: seen.append(at))
    assert converted.difference is not None and converted.difference <= conversion.LARGEST_DIFFERENCE
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)
    names = {file.name for file in converted.files}
    assert names >= {"config.json", "generation_config.json", "model.safetensors.index.json", "SHA256SUMS"}
    assert names >= {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.model"}
    manifest = Manifest.find(folder)
    assert manifest is not None
    manifest.check_complete(open_checkpoint(folder))
    manifest.verify([file for file in converted.files if file.name != "SHA256SUMS"])
    config, expected = weights_of(SOURCE)
    assert all(torch.equal(values, expected[name]) for name, values in weights_of(folder)[1].items())

    assert convert(folder, back, "meta", 1, verify=False).difference is None
    again, got = weights_of(back)
    assert (again.dim, again.hidden_dim, again.rope) == (config.dim, config.hidden_dim, config.rope)
    assert got.keys() == expected.keys() and all(torch.equal(values, expected[name]) for name, values in got.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_every_family_that_is_written(tmp_path: Path, name: str) -> None:
    """From weights alone: the configuration is written anew, not copied."""
    config = read(CONFIGS[name])
    weights = random_weights(config)
    folder = write(tmp_path / "source", CONFIGS[name], weights)
    written = hugging_face.config_of(config, torch.float32, (7, 5), 1)
    assert read(written) == config and written["eos_token_id"] == [5, 7]
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(written))
    reader = open_checkpoint(folder).open_weights(config)
    safetensors_writer.write_weights(reader, config, torch.float32, target, 3, lambda done, total: None)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config.model_type == written["model_type"]
    found = model.state_dict()
    for weight, values in in_hugging_faces_layout(weights, config).items():
        assert torch.equal(found[weight], values), weight


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("qwen2", "no biases"),
        ("qwen3", "no norms of q and k"),
        ("mistral", "no sliding windows"),
        ("mistral-nemo", "no head_dim of its own"),
        ("llama-linear", "no rope type linear"),
        ("llama3.1", "cannot describe this model's rotary embedding"),  # its original context is not 8192
    ],
)
def test_what_metas_format_cannot_say_is_named(name: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        meta.params_of(read(CONFIGS[name]), IDS)
    with pytest.raises(ConfigError, match="no vocabulary padded from 600 to 640 ids"):
        meta.params_of(read(CONFIGS["llama2"]), 600)


@pytest.mark.parametrize("hidden_dim", [96, 160, 172, 1000])
def test_any_width_of_the_feed_forward_layer_survives(hidden_dim: int) -> None:
    config = read(CONFIGS["llama2"] | {"intermediate_size": hidden_dim})
    assert config_from_params(meta.params_of(config, IDS), vocab_size=IDS).hidden_dim == hidden_dim


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_core.convert.verification.largest_difference", lambda *arguments: float("nan"))
    with pytest.raises(CheckpointError, match="logits differ"):
        convert(SOURCE, tmp_path / "target", "hf")
    with pytest.raises(ConfigError, match="3 shards do not divide every dimension"):
        convert(SOURCE, tmp_path / "target", "meta", 3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="exists already"):
        convert(SOURCE, tmp_path, "hf")


def test_the_command_prints_files_and_difference_or_the_error(tmp_path: Path) -> None:
    arguments = ["convert", str(SOURCE), str(tmp_path / "target"), "--format", "hf", "--shards", "2"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "SHA256SUMS" in done.output and "logits of SOURCE and TARGET: 0" in done.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1 and again.output == f"convert: {tmp_path / 'target'}: exists already\n"


def with_two_tokenizers(folder: Path) -> tuple[Path, int]:
    """A model whose ids are those of tokenizer.json, beside a tokenizer.model with other ids; the number of its ids."""
    ids = load_tokenizer(make_family("llama2_legacy", folder)).n_words
    config = CONFIGS["llama2"] | {"vocab_size": ids}
    write(folder, config, random_weights(read(config, ids)))
    shutil.copyfile(SOURCE / "tokenizer.model", folder / "tokenizer.model")
    assert load_tokenizer(folder / "tokenizer.model").n_words != ids
    return folder, ids


def test_the_target_has_only_the_tokenizer_whose_ids_the_model_has(tmp_path: Path) -> None:
    """A folder in Meta's format prefers tokenizer.model."""
    source, ids = with_two_tokenizers(tmp_path / "source")
    converted = convert(source, tmp_path / "target", "meta", verify=False)
    names = {file.name for file in converted.files}
    assert "tokenizer.json" in names and "tokenizer.model" not in names
    assert load_tokenizer(tmp_path / "target").n_words == ids


def test_a_target_that_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = with_two_tokenizers(tmp_path / "source")

    def copy_the_other(_: object, folder: Path) -> None:
        shutil.copyfile(source / "tokenizer.model", folder / "tokenizer.model")

    monkeypatch.setattr(conversion, "_copy_tokenizer", copy_the_other)
    with pytest.raises(LlamaError, match="vocab"):
        convert(source, tmp_path / "target", "meta", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("quantize", "weight_format"), [("int4", "int4"), ("int8", "int8_groups")])
def test_a_quantized_target_holds_the_codes_of_the_source(
    tmp_path: Path, quantize: conversion.Quantize, weight_format: str
) -> None:
    config = read(CONFIGS["llama2"])
    weights = random_weights(config)
    source, first, again = write(tmp_path / "source", CONFIGS["llama2"], weights), tmp_path / "first", tmp_path / "2"
    converted = convert(source, first, "hf", 2, quantize=quantize)
    assert converted.difference is not None and converted.difference <= conversion.LARGEST_DIFFERENCE
    convert(first, again, "hf", quantize=quantize, verify=False)
    for folder in (first, again):
        reader = open_checkpoint(folder).open_weights(config)
        for name, spec in weight_specs(config).items():
            if not is_quantized(name):
                continue
            (part,) = reader.grouped_slices(name, Box((0, 0), spec.shape))
            codes, scales, _ = quantize_groups(weights[name], weight_format)
            assert torch.equal(part.codes, codes) and torch.equal(part.scales, scales), name
    expanded = tmp_path / "expanded"
    convert(first, expanded, "hf", dtype="float32", verify=False)
    assert "quantization_config" not in json.loads((expanded / "config.json").read_text())
    assert open_checkpoint(expanded).open_weights(config).stored_format("layers.0.attention.wq.weight") == "dense"


def test_what_cannot_be_quantized_is_refused_with_the_reason(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["convert", str(SOURCE), str(tmp_path / "meta"), "--format", "meta", "--quantize", "int4"]
    )
    assert done.exit_code == 2 and "Meta's format has no scales of groups" in done.output
    source = write(tmp_path / "source", CONFIGS["smollm2"], random_weights(read(CONFIGS["smollm2"])))
    with pytest.raises(ConfigError, match=r"wq\.weight has 72 inputs, which groups of 32 do not divide"):
        convert(source, tmp_path / "target", "hf", quantize="int8")
