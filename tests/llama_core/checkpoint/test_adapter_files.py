"""adapter_config.json and adapter_model.safetensors: what does not fit the base, or is not computed, is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_core.errors import CheckpointError, ConfigError
from llama_core.files.adapter import open_adapter
from tests.support import adapters
from tests.support.hugging_face import CONFIGS, read

MODEL = read(CONFIGS["llama2"])
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def write(folder: Path, tensors: Mapping[str, torch.Tensor | None] | None = None, **fields: Any) -> Path:
    """An adapter of rank 2 for one matrix, with other fields and tensors (None: without that one)."""
    folder.mkdir(exist_ok=True)
    width = MODEL.n_heads * MODEL.head_dim
    own: dict[str, torch.Tensor | None] = {
        f"{Q}A.weight": torch.ones(2, MODEL.dim),
        f"{Q}B.weight": torch.ones(width, 2),
    }
    config = adapters.PLAIN | {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {n: t for n, t in (own | dict(tensors or {})).items() if t is not None}, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"lora_alpha": 3.0, "alpha_pattern": {"q_proj": 1}}, 0.5),
        ({"lora_alpha": 3.0, "alpha_pattern": {"q_proj": 0}}, 0.0),
        ({"lora_alpha": 0}, 0.0),
        ({"lora_alpha": -3}, -1.5),
        ({"r": 64, "rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 2}}, 2.0),
        ({"layers_to_transform": [0, 1], "modules_to_save": [], "trainable_token_indices": None}, 2.0),
    ],
)
def test_the_factor_is_that_of_peft(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    pairs = open_adapter(write(tmp_path, **fields), MODEL, 16).pairs
    assert {name: pair.scale for name, pair in pairs.items()} == {"layers.0.attention.wq.weight": pytest.approx(scale)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"adapter_config.json: field 'modules_to_save' is not supported"),
        ({"use_dora": True}, "'use_dora' is not supported"),
        ({"bias": "lora_only"}, "'bias' is not supported"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is not supported"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' is not supported"),
        ({"alora_invocation_tokens": [5]}, "'alora_invocation_tokens' is not supported"),
        ({"peft_type": "LOHA"}, "'peft_type' must be LORA"),
        ({"r": 129}, "'r' must be a positive integer, at most 128"),
        ({"r": 3}, r"lora_A.weight has shape \[2, .*expected \[3, "),
        ({"lora_alpha": None}, "'lora_alpha' is missing"),
        ({"lora_alpha": "4"}, "'lora_alpha' must be a number"),
        ({"rank_pattern": {"(": 2}}, "'rank_pattern': not a regular expression"),
        ({"rank_pattern": {"(([a-z_]|[a-z_.0-9])+)+X": 2}}, "repeats a group"),
        ({"alpha_pattern": {".*.*.*.*X": 2}}, "more than 3 quantifiers"),
        ({"alpha_pattern": {"q_proj": "2"}}, "'alpha_pattern' must be an object of numbers"),
        ({"rank_pattern": {f"module_{i}": 2 for i in range(1001)}}, "'rank_pattern' has 1001 keys, at most 1000"),
        ({"layers_to_transform": [1]}, "'layers_to_transform' leaves out"),
    ],
)
def test_fields_that_are_not_computed_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_adapter(write(tmp_path, **fields), MODEL, 16)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}B.weight": None}, "has lora_A alone"),
        ({f"{Q}B.weight": torch.ones(8, 2)}, r"lora_B.weight has shape \[8, 2\]"),
        ({f"{Q}A.weight": torch.ones(2, MODEL.dim, dtype=torch.int8)}, "lora_A.weight has dtype I8"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 4)}, "lm_head cannot have adapters"),
        (
            {"base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight": torch.ones(2, 4)},
            "layers.99.* is not lora_A",
        ),
        ({f"{Q}A.weight": None, f"{Q}B.weight": None}, "has no adapter"),
    ],
)
def test_matrices_that_do_not_fit_the_base_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_adapter(write(tmp_path, tensors), MODEL, 16)


def test_a_higher_rank_than_allowed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 2 is over max_lora_rank, 1: raise it"):
        open_adapter(write(tmp_path), MODEL, 1)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json: no such file"):
        open_adapter(tmp_path, MODEL, 16)
    config = tmp_path / "adapter_config.json"
    config.write_text(" " * 2_000_000)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: has more than 1000000 bytes"):
        open_adapter(tmp_path, MODEL, 16)
    weights = write(tmp_path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: damaged"):
        open_adapter(tmp_path, MODEL, 16)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin is not read"):
        open_adapter(tmp_path, MODEL, 16)


def test_the_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    first, same = open_adapter(write(tmp_path / "a"), MODEL, 16), open_adapter(write(tmp_path / "b"), MODEL, 16)
    changed = {f"{Q}A.weight": 1 + load_file(tmp_path / "a" / "adapter_model.safetensors")[f"{Q}A.weight"]}
    other = open_adapter(write(tmp_path / "a", changed), MODEL, 16)
    assert first.digest == same.digest != other.digest
