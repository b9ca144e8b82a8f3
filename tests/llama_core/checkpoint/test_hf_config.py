"""config.json: absent fields have transformers' defaults, and what this server does not compute is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from llama_core.checkpoint.hugging_face import HuggingFaceCheckpoint
from llama_core.errors import ConfigError
from llama_core.model.families import families
from llama_core.model.operations import FULL_ATTENTION, Temperature
from tests.support.hugging_face import CONFIGS, read

BASE = CONFIGS["llama2"]
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


@pytest.mark.parametrize("model_type", families())
def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    sizes = dict(zip(REQUIRED, (4096, 32, 32, 1000, 11008), strict=True))
    given = {"model_type": model_type} | sizes
    (tmp_path / "config.json").write_text(json.dumps(given))
    reference = AutoConfig.from_pretrained(tmp_path)
    config = read(given)
    assert config.n_kv_heads == reference.num_key_value_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or 128)
    assert config.norm_eps == reference.rms_norm_eps
    ropes = reference.rope_parameters
    by_kind = {kind: ropes.get(kind, ropes)["rope_theta"] for kind in ("full_attention", "sliding_attention")}
    assert {each.rope.theta for each in config.angles if each.rope} == set(by_kind.values())
    assert config.context_length == reference.max_position_embeddings
    assert config.tied_embeddings is reference.tie_word_embeddings
    chunk = getattr(reference, "attention_chunk_size", None)
    window = chunk or getattr(reference, "sliding_window", None) or FULL_ATTENTION
    kinds = getattr(reference, "layer_types", None) or ["sliding_attention"] * 32
    assert config.windows == tuple(FULL_ATTENTION if kind == "full_attention" else window for kind in kinds)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_completes_is_read_alike(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read(json.loads((tmp_path / "config.json").read_text())) == read(CONFIGS[name])


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 256),
        ({"rope_type": "default"}, 256),
        ({"type": "linear", "factor": 4}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 256),
    ],
)
def test_the_context_length_includes_the_stretch(scaling: dict[str, Any] | None, context: int) -> None:
    assert read(BASE | {"rope_scaling": scaling}).context_length == context


def test_the_temperature_of_queries_is_that_of_the_rotary_embedding_that_counts() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}
    config = read(BASE | {"model_type": "ministral3", "head_dim": 8, "rope_scaling": yarn})
    assert {each.temperature for each in config.angles} == {Temperature(0.3, 32), None}


def test_llama_4_without_experts_is_dense() -> None:
    """As transformers' converter writes Llama Guard 4."""
    none = {"moe_layers": [], "num_local_experts": 0, "num_experts_per_tok": 0, "interleave_moe_layer_step": 0}
    config = read(CONFIGS["llama4-moe"] | none)
    assert config.n_experts == 0 and config.hidden_dim == 64


@pytest.mark.parametrize(
    ("name", "width"), [("mixtral", "intermediate_size"), ("qwen2-moe", "shared_expert_intermediate_size")]
)
def test_an_expert_has_a_part_for_each_rank(name: str, width: str) -> None:
    config = read(CONFIGS[name] | {width: 2})
    config.check_world_size(2)
    with pytest.raises(ConfigError, match="model_parallel_size 4 is more than the width 2 of an expert"):
        config.check_world_size(4)


def test_a_padded_embedding_is_larger_than_the_tokenizer_and_never_smaller() -> None:
    assert read(BASE, vocab_size=600).vocab_size == 640
    with pytest.raises(ConfigError, match="vocab_size is 640, but the tokenizer has 641 tokens"):
        read(BASE, vocab_size=641)


QUANTIZED = {"quantization_config": {"quant_method": "bitsandbytes"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported, only exaone4, gemma3, gemma3_text, glm4"),
    ({"model_type": None}, "model_type '' is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architecture 'LlamaForSequenceClassification'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"num_experts": 8}, "num_experts 8"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (QUANTIZED, "by 'bitsandbytes' are not supported, only by awq, .*; use the model's original weights"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
    ({"rope_scaling": {"rope_type": "ntk"}}, "rope type 'ntk' is not supported, only default, linear"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "field 'short_factor' must be a list of at most 4 numbers"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 9}},
        "'short_factor' must be a list of at most 4 numbers",
    ),
    ({"model_type": "phi3", "partial_rotary_factor": 1e308}, "partial_rotary_factor other than 1"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.4}, "3 of 8 values of a head are rotated"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 2, 1]}, "a list of 0 or 1 for each layer"),
    ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    (
        {"model_type": "gemma3", "text_config": {"model_type": "llama"}},
        "is 'llama', which is not supported inside gemma3",
    ),
    ({"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]}, "only ...ForCausalLM and"),
    ({"model_type": "mixtral", "num_local_experts": 2**31 - 1}, "chooses 2 of 2147483647 experts"),
    ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "chooses 5 of 4 experts"),
    ({"model_type": "mixtral", "num_local_experts": 4096, "intermediate_size": 2**20}, "which is out of range"),
    ({"model_type": "llama4_text", "moe_layers": 1}, "moe_layers' must be a list of layers"),
    ({"attention_chunk_size": 8192}, "attention_chunk_size 8192 is not supported"),
    ({"use_qk_norm": True}, "use_qk_norm"),
    ({"attn_temperature_tuning": True}, "attn_temperature_tuning"),
    ({"model_type": "gpt_oss", "swiglu_limit": 8.0}, "swiglu_limit 8.0 is not supported, only 7.0"),
    (
        {"model_type": "ministral3", "rope_scaling": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        "needs a rotary embedding with an original context",
    ),
    ({"model_type": "mistral3", "text_config": []}, "'text_config' must be an object"),
    ({"model_type": "muse_glimmer_text", "head_dim": 16, "layer_rope_theta": [0]}, "a list of a number for each layer"),
    (
        {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "field 'sliding_attention' stretches the context",
    ),
    ({"model_type": "granite", "residual_multiplier": -1}, "residual_multiplier"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1]}}, "field 'mrope_section'"),
    ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "field 'full_attention' is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: field 'factor' must be a number of at least 1"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
    ({"rope_theta": 1}, "rope theta must be more than 1"),
    ({"model_type": "mistral", "attention_bias": True}, "model_type mistral has no attention_bias"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "the model_type is ministral"),
    ({"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention'"),
    ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "there is no sliding_window"),
    ({"num_key_value_heads": 3}, "not divisible by n_kv_heads"),
    ({"num_attention_heads": 7}, "not divisible by num_attention_heads"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"hidden_size": "64"}, "field 'hidden_size' must be a positive integer"),
    ({"tie_word_embeddings": 1}, "field 'tie_word_embeddings' must be true or false"),
    ({"rms_norm_eps": float("nan")}, "field 'rms_norm_eps'"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE | changes))
    with pytest.raises(ConfigError, match=message) as raised:
        HuggingFaceCheckpoint(tmp_path).model_config(vocab_size=640)
    assert str(path) in raised.value.message


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_size_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"field '{name}' is missing"):
        read({key: value for key, value in BASE.items() if key != name})
