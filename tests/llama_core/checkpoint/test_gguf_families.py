"""A family's model in GGUF, named by the gguf package and ordered as llama.cpp's converter does it, is that of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import ConfigError
from llama_core.model.config import ModelConfig
from llama_core.model.operations import Rotate
from llama_core.model.share import RankShare
from tests.support import families
from tests.support.gguf_models import write_model
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE
from tests.support.rank_weights import rank_weights

# By name in CONFIGS: the architecture, and whether the converter reorders the rows of q and k, as for Llama.
ARCHITECTURES = {
    "exaone4": (gguf.MODEL_ARCH.EXAONE4, False),
    "gemma3": (gguf.MODEL_ARCH.GEMMA3, False),
    "glm4": (gguf.MODEL_ARCH.GLM4, False),
    "ministral3": (gguf.MODEL_ARCH.MISTRAL3, True),
    "mistral-small": (gguf.MODEL_ARCH.MISTRAL3, True),
    "olmoe": (gguf.MODEL_ARCH.OLMOE, False),
    "olmo2": (gguf.MODEL_ARCH.OLMO2, False),
    "olmo3": (gguf.MODEL_ARCH.OLMO2, False),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2-moe": (gguf.MODEL_ARCH.QWEN2MOE, False),
    "qwen3-moe": (gguf.MODEL_ARCH.QWEN3MOE, False),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, True),
    "gpt-oss": (gguf.MODEL_ARCH.GPT_OSS, False),
    "granite": (gguf.MODEL_ARCH.GRANITE, True),
    "granite-moe": (gguf.MODEL_ARCH.GRANITE_MOE, True),
    "llama4-scout": (gguf.MODEL_ARCH.LLAMA4, False),
    "phi4-mini": (gguf.MODEL_ARCH.PHI3, False),
    "phi4": (gguf.MODEL_ARCH.PHI3, False),
    "seed-oss": (gguf.MODEL_ARCH.SEED_OSS, False),
    "seed-oss-biases": (gguf.MODEL_ARCH.SEED_OSS, False),
}


_OF_EXPERTS = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 8}
_WINDOW, _PATTERN = {"attention.sliding_window": 8}, "attention.sliding_window_pattern"


def _permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama.cpp's converter permutes the rows of Llama's q and k."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write(path: Path, name: str, weights: Mapping[str, torch.Tensor]) -> Path:
    given, (architecture, permutes) = CONFIGS[name].get("text_config", CONFIGS[name]), ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    layers, heads = given["num_hidden_layers"], given["num_attention_heads"]
    head_dim = given.get("head_dim", given["hidden_size"] // heads)
    writer.add_block_count(layers)
    writer.add_context_length(given["max_position_embeddings"])
    writer.add_embedding_length(given["hidden_size"])
    writer.add_feed_forward_length(given.get("intermediate_size_mlp", given["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(given["num_key_value_heads"])
    if "head_dim" in given:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(given["rms_norm_eps"])
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    writer.add_rope_freq_base(given.get("rope_theta") or scaling.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(int(head_dim * given.get("partial_rotary_factor", 0.5 if name == "glm4" else 1.0)))
    if (window := given.get("sliding_window")) is not None:
        writer.add_sliding_window(window)
        if name in ("exaone4", "olmo3"):
            writer.add_sliding_window_pattern([(i + 1) % 4 != 0 for i in range(layers)])
    if (kind := scaling.get("rope_type")) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if name == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    if name in ("granite", "granite-moe"):
        writer.add_attention_scale(given["attention_multiplier"])
        writer.add_embedding_scale(given["embedding_multiplier"])
        writer.add_residual_scale(given["residual_multiplier"])
        writer.add_logit_scale(given["logits_scaling"])
    if (count := given.get("num_experts", given.get("num_local_experts"))) is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(given["num_experts_per_tok"])
    has_expert_width = name in ("gpt-oss", "llama4-scout")
    if (width := given["intermediate_size"] if has_expert_width else given.get("moe_intermediate_size")) is not None:
        writer.add_expert_feed_forward_length(width)
    if (width := given.get("shared_expert_intermediate_size")) is not None:
        writer.add_expert_shared_feed_forward_length(width)
    if "interleave_moe_layer_step" in given:
        writer.add_interleave_moe_layer_step(given["interleave_moe_layer_step"])
    factors: dict[gguf.MODEL_TENSOR, list[float]] = {}
    if kind == "llama3":  # whose bounds are equal in Llama 4
        waves = 2 * np.pi * given["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        is_long = waves > scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        factors[gguf.MODEL_TENSOR.ROPE_FREQS] = np.where(is_long, scaling["factor"], 1.0).tolist()
    if scaling.get("type") == "longrope":
        original = given["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = given["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(stretch) / np.log(original))))
        factors[gguf.MODEL_TENSOR.ROPE_FACTORS_LONG] = scaling["long_factor"]
        factors[gguf.MODEL_TENSOR.ROPE_FACTORS_SHORT] = scaling["short_factor"]
    for kind, values in factors.items():
        writer.add_tensor(f"{gguf.TENSOR_NAMES[kind]}.weight", np.array(values, np.float32))
    names = gguf.get_tensor_name_map(architecture, layers)
    for stored, weight in _stacked(weights, name).items():
        if permutes and (".q_proj." in stored or ".k_proj." in stored):
            weight = _permuted(weight, heads if ".q_proj." in stored else given["num_key_value_heads"])
        if name == "gemma3" and stored.endswith("norm.weight"):
            weight = weight + 1
        if ".shared_expert_gate." in stored:
            weight = weight[0]  # of one row, as converters of 2024 write it
        own = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert own is not None
        writer.add_tensor(own, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _load(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    source = open_checkpoint(path)
    config = source.model_config(VOCAB_SIZE)
    return config, dict(rank_weights(source.open_weights(config), config, RankShare.of(config, 0, 1), torch.float32))


def _stacked(weights: Mapping[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """With gate and up of all experts apart, as GGUF has them. transformers has both in one tensor: one below the other, of
    gpt-oss in turn; of gpt-oss and Llama 4 it is [inputs, outputs]."""
    stacked: dict[str, torch.Tensor] = {}
    is_turned = model in ("gpt-oss", "llama4-scout")
    for name, weight in weights.items():
        for theirs, known in (("router", "block_sparse_moe.router.layer"), ("experts", "mlp.experts")):  # of Granite
            name = name.replace(f"block_sparse_moe.{theirs}", known)
        kind, own = (".bias" if name.endswith("_bias") else ".weight"), name.removesuffix("_bias")
        if ".experts." not in name:
            stacked[name + kind if name.endswith(".sinks") else name] = weight
            continue
        if is_turned and weight.ndim == 3:
            weight = weight.transpose(1, 2)
        if not own.endswith(".gate_up_proj"):
            stacked[own + kind] = weight
            continue
        halves = (weight[:, ::2], weight[:, 1::2]) if model == "gpt-oss" else weight.chunk(2, dim=1)
        stacked |= {
            own.replace("gate_up", part) + kind: half for part, half in zip(("gate", "up"), halves, strict=True)
        }
    return stacked


def _is_of_text(name: str) -> bool:
    return name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_familys_gguf_is_the_model_of_transformers(tmp_path: Path, name: str) -> None:
    model = families.new_model(tmp_path / "hf", name)
    parts = (key.replace(".language_model", "") for key in model.state_dict())
    weights = {key: weight for key, weight in zip(parts, model.state_dict().values(), strict=True) if _is_of_text(key)}
    if CONFIGS[name].get("tie_word_embeddings", model.config.tie_word_embeddings):
        weights.pop("lm_head.weight", None)
    config, expected = _load(tmp_path / "hf")
    got_config, got = _load(_write(tmp_path / "m.gguf", name, weights))
    assert _rounded(got_config) == _rounded(config)
    assert got.keys() == expected.keys()
    for key, weight in got.items():  # those of norms are 1 + weight in GGUF, which rounds
        assert torch.equal(weight, expected[key]) or (
            name == "gemma3" and torch.allclose(weight, expected[key], atol=1e-6)
        )


def _rounded(value: Any) -> Any:
    """GGUF holds float32."""
    if isinstance(value, float):
        return float(np.float32(value))
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return type(value).__name__, [_rounded(getattr(value, field)) for field in fields]
    return [_rounded(each) for each in value] if isinstance(value, tuple) else value


def test_a_part_of_a_head_is_rotated_in_no_other_family(tmp_path: Path) -> None:
    model = families.new_model(tmp_path / "hf", "granite")
    weights = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    path = _write(tmp_path / "m.gguf", "granite", weights)
    key, few, whole = b"granite.rope.dimension_count", (4).to_bytes(4, "little"), (8).to_bytes(4, "little")
    data = path.read_bytes()
    at = data.index(key) + len(key) + 4
    assert data[at : at + 4] == whole
    path.write_bytes(data[:at] + few + data[at + 4 :])
    with pytest.raises(ConfigError, match="must be the width 8 of a head"):
        _load(path)


@pytest.mark.parametrize(
    ("pattern", "windows"), [({}, (8, 8)), ({_PATTERN: 2}, (8, 0)), ({_PATTERN: [False, True]}, (0, 8))]
)
def test_a_pattern_of_windows_is_a_list_a_number_or_the_familys(
    tmp_path: Path, pattern: dict[str, object], windows: tuple[int, ...]
) -> None:
    path = write_model(tmp_path, "exaone4", keys=_WINDOW | pattern)
    assert open_checkpoint(path).model_config(96).windows == windows


@pytest.mark.parametrize(("experts", "has_norms"), [(16, {True, False}), (128, {False})])
def test_llama_4_norms_heads_of_layers_that_rotate_but_in_maverick(
    tmp_path: Path, experts: int, has_norms: set[bool]
) -> None:
    keys = _OF_EXPERTS | {"block_count": 4, "interleave_moe_layer_step": 2, "expert_count": experts}
    config = open_checkpoint(write_model(tmp_path, "llama4", keys=keys)).model_config(96)
    rotations = [each for layer in config.layers for each in layer if isinstance(each, Rotate)]
    assert {each.has_plain_norms for each in rotations} == has_norms
    assert [each.rope is None for each in rotations] == [False, False, False, True]


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("exaone4", _WINDOW | {_PATTERN: [True] * 3}, "sliding_window_pattern must be 2 truth values"),
        ("exaone4", {"attention.layer_norm_rms_epsilon": []}, "layer_norm_rms_epsilon is missing"),
        ("exaone4", {"rope.freq_base_swa": 1e3}, "rope.freq_base_swa must be rope.freq_base"),
        (
            "glm4",
            {"rope.dimension_sections": [16, 24, 24, 0]},
            "dimension_sections is .16, 24, 24, 0., which is not supported",
        ),
        ("llama4", _OF_EXPERTS | _WINDOW, "attention.sliding_window is 8, which is not supported"),
        ("llama4", _OF_EXPERTS | {"attention.sliding_window": 0}, "attention.sliding_window is 0"),
        ("llama4", _OF_EXPERTS | {_PATTERN: 2}, "sliding_window_pattern is 2, which is not supported"),
        ("qwen2", {"expert_count": 4}, "experts of the architecture 'qwen2' are not supported"),
        ("of\ntomorrow", {}, r"the architecture 'of\\ntomorrow' is not supported, only exaone4"),
    ],
)
def test_what_a_family_needs_is_refused_by_name(
    tmp_path: Path, architecture: str, keys: dict[str, object], message: str
) -> None:
    path = write_model(tmp_path, architecture, keys=keys)
    with pytest.raises(ConfigError, match=message) as refused:
        open_checkpoint(path).model_config(96)
    assert str(path) in str(refused.value)
