"""Packed weights of compressed-tensors: codes and scales survive, every rank gets its part, and damage is named."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llama_core.backends.weight_formats.matrices import quantize_groups
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError, ConfigError
from llama_core.files.hf.quantization import FORMATS
from llama_core.files.source import WeightReader
from llama_core.model.share import RankShare
from llama_core.model.weights import OUTPUT, Box, weight_specs
from tests.support.hugging_face import (
    CONFIGS,
    VOCAB_SIZE,
    in_hugging_faces_layout,
    quantization_config,
    random_weights,
    read,
    write,
)
from tests.support.rank_weights import rank_weights

CONFIG = CONFIGS["llama-biases"]
MODEL = read(CONFIG)
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def packed_folder(
    folder: Path, bits: int, changes: Mapping[str, torch.Tensor | None] | None = None
) -> tuple[Path, Tensors]:
    """Packs by its own arithmetic: 32-bit words, codes shifted into them. changes: other tensors (None: without that one).
    Returns the weights in Meta's layout."""
    weights = random_weights(MODEL)
    write(folder, CONFIG | {"quantization_config": quantization_config(bits)}, weights)
    stored: Tensors = {}
    for name, weight in in_hugging_faces_layout(weights, MODEL).items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        codes, scales, _ = quantize_groups(weight, FORMATS[bits])
        positive = codes.long() + (128 if bits == 8 else 0)
        words = positive.view(len(weight), -1, 32 // bits) << (torch.arange(32 // bits) * bits)
        stored[f"{name}_packed"] = words.sum(-1).to(torch.int32)
        stored[f"{name}_scale"] = scales.half()
        stored[f"{name}_shape"] = torch.tensor(weight.shape)
    changed = stored | dict(changes or {})
    save_file({name: each for name, each in changed.items() if each is not None}, folder / "model.safetensors")
    return folder, weights


def opened(folder: Path) -> WeightReader:
    source = open_checkpoint(folder)
    return source.open_weights(source.model_config(VOCAB_SIZE))


@pytest.mark.parametrize("bits", [4, 8])
def test_each_rank_reads_its_codes_and_scales_in_metas_order(tmp_path: Path, bits: int) -> None:
    folder, weights = packed_folder(tmp_path, bits)
    reader = opened(folder)
    for name, spec in weight_specs(MODEL).items():
        if name == OUTPUT or not spec.is_linear:
            assert reader.stored_format(name) == "dense"
            continue
        assert reader.stored_format(name) == FORMATS[bits]
        codes, scales, _ = quantize_groups(weights[name], FORMATS[bits])
        for rank in range(2):
            (row, column), (rows, columns) = box = spec.part(RankShare.of(MODEL, rank, 2))
            first = column - column % 32
            columns = -(-(column + columns) // 32) * 32 - first  # whole groups
            parts = list(reader.grouped_slices(name, Box((row, first), (rows, columns))))
            own = slice(row, row + rows)
            assert torch.equal(torch.cat([part.codes for part in parts]), codes[own, first : first + columns])
            got = torch.cat([part.scales for part in parts])
            assert torch.equal(got, scales[own, first // 32 : (first + columns) // 32])
            dense = (codes.float() - (8 if bits == 4 else 0)) * scales.repeat_interleave(32, 1)
            expected = dense[own, box.start[1] : box.start[1] + box.shape[1]]
            assert torch.equal(torch.cat([part.values for part in reader.slices(name, box)]), expected)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("_scale", None, f"{PROJECTION}_scale is missing"),
        ("_shape", None, f"{PROJECTION}_shape is missing"),
        ("_packed", torch.zeros(64, 7, dtype=torch.int32), rf"{PROJECTION}_packed has shape \[64, 7\], expected \[64, 8\]"),
        ("_packed", torch.zeros(64, 8), f"{PROJECTION}_packed has dtype F32, expected I32"),
        ("_shape", torch.tensor([64, 60]), rf"{PROJECTION}_shape is \[64, 60\], expected \[64, 64\]"),
        ("_zero_point", torch.zeros(8, 2, dtype=torch.int32), f"{PROJECTION}_zero_point' in model.safetensors is unexpected"),
        ("", torch.zeros(64, 64), f"{PROJECTION}_packed' in .* is unexpected"),
        ("_scale", torch.full((64, 2), torch.nan).half(), r"layers\.0\.attention\.wq.* not finite"),
    ],
)  # fmt: skip
def test_damaged_parts_are_refused_by_name(tmp_path: Path, part: str, value: torch.Tensor | None, message: str) -> None:
    folder, _ = packed_folder(tmp_path, 4, {f"{PROJECTION}{part}": value})
    share = RankShare.of(MODEL, 0, 1)
    with pytest.raises(CheckpointError, match=message):
        dict(rank_weights(opened(folder), MODEL, share, torch.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int-quantized"}, "format 'int-quantized' is not supported, only 'pack-quantized'"),
        ({"num_bits": 3}, "num_bits 3 is not supported, only 4, 8"),
        ({"num_bits": 4.0}, r"num_bits 4\.0"),
        ({"symmetric": False}, "symmetric False"),
        ({"group_size": 128}, "group_size 128 is not supported, only 32"),
        ({"strategy": "channel"}, "strategy 'channel'"),
        ({"actorder": "group"}, "actorder 'group'"),
        ({"input_activations": {"num_bits": 8}}, "input_activations"),
        ({"targets": ["Embedding"]}, "targets"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"R1": {}}}, "transform_config"),
        ({"config_groups": {}}, "config_groups must have one group"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "W4A16"),
        ({"group_size": None}, "field 'group_size' is missing"),
    ],
)
def test_other_quantizations_are_refused_by_name_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    config = deepcopy(quantization_config(4))
    group = config["config_groups"]["group_0"]
    for name, value in changes.items():
        holder = next((each for each in (group["weights"], group) if name in each), config)
        holder[name] = value
    if "actorder" in changes:
        group["weights"]["actorder"] = changes["actorder"]
        del config["actorder"]
    with pytest.raises(ConfigError, match=f"quantization_config.*{message}.*GGUF|{message}.*GGUF"):
        read(CONFIG | {"quantization_config": config})
