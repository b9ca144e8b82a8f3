"""Experts of gpt-oss in MXFP4, as they are published: their values are transformers', whole and in the parts of ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError
from llama_core.model.share import RankShare
from llama_core.model.weights import weight_specs
from tests.support import families
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE
from tests.support.rank_weights import rank_weights

EXPERTS = CONFIGS["gpt-oss"]["num_local_experts"]


def _packed(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a made model by random blocks. Returns transformers' values of them, by name, turned."""
    families.new_model(folder, "gpt-oss")
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    stored, values = load_file(file), {}
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        _, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 128, (EXPERTS, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return values


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_ranks_part_has_the_values_of_transformers(tmp_path: Path, world_size: int) -> None:
    values = _packed(tmp_path / "m")
    source = open_checkpoint(tmp_path / "m")
    config = source.model_config(VOCAB_SIZE)
    reader, specs = source.open_weights(config), weight_specs(config)
    experts = {name: spec for name, spec in specs.items() if spec.expert is not None and spec.is_linear}
    assert {reader.stored_format(name) for name in experts} == {"mxfp4"}
    for rank in range(world_size):
        share = RankShare.of(config, rank, world_size)
        parts = dict(rank_weights(reader, config, share, torch.float32))
        for name, spec in experts.items():
            assert spec.rows is not None
            whole = values[spec.hugging_face][spec.expert].T[spec.rows.first :: spec.rows.step]
            (row, column), (rows, columns) = spec.part(share)
            assert torch.equal(parts[name], whole[row : row + rows, column : column + columns])


def test_blocks_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    _packed(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(stored | {name: stored[name][:, 1:].contiguous()}, file, metadata={"format": "pt"})
    source = open_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match=f"{name} has shape"):
        source.open_weights(source.model_config(VOCAB_SIZE))
