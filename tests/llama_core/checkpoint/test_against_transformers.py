"""Folders that transformers writes: the architecture, rotary frequencies and weights that it reads are those that we read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llama_core.checkpoint.loader import rank_weights
from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.execution.rotary import rotary_table
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE, in_hugging_faces_layout, read


def saved(directory: Path, given: dict[str, Any], shard_size: str = "10GB") -> PreTrainedModel:
    """A random model of this config.json, written by transformers."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(given))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases and norms would be constants
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_transformers_wrote_has_its_values(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, CONFIGS[name], "100KB" if name in ("llama2", "qwen2") else "10GB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or name not in ("llama2", "qwen2")
    config = checkpoint.model_config(VOCAB_SIZE)
    assert config == read(CONFIGS[name]), "transformers 5 writes the same architecture in other words"
    reader = checkpoint.open_weights(config)
    weights = dict(rank_weights(reader, config, RankShare.of(config, 0, 1), torch.float32, torch.device("cpu")))
    expected = model.state_dict()
    if config.tied_embeddings:
        del expected["lm_head.weight"]
    got = in_hugging_faces_layout(weights, config)
    assert got.keys() == expected.keys()
    for weight, values in expected.items():
        assert torch.equal(got[weight], values), weight


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rotary_frequencies_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    config = read(CONFIGS[name])
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    length = 512 if config.rope.kind == "dynamic" else 100
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(length)[None])
    half = config.head_dim // 2
    table = rotary_table(config.rope, config.head_dim, length, torch.device("cpu"))
    torch.testing.assert_close(table[..., 0], cos[0, :, :half], atol=1e-4, rtol=0)
    torch.testing.assert_close(table[..., 1], sin[0, :, :half], atol=1e-4, rtol=0)
    windows = tuple(
        getattr(layer.self_attn, "sliding_window", getattr(model.config, "sliding_window", None)) or 0
        for layer in model.model.layers
    )
    assert windows == tuple(config.window(layer) for layer in range(config.n_layers))
    assert model.config.rms_norm_eps == config.norm_eps
