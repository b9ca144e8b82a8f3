"""Random checkpoints of known shapes, in Meta's format for us and in Hugging Face's for others, with the same weights.

    python -m benchmarks make_checkpoint llama-110m --tokenizer tokenizer.model --out checkpoints --format meta hf

Makes OUT/NAME/meta and OUT/NAME/hf. Any tokenizer.model does: its vocabulary is the model's. Speed does not depend
on the weights' values; they are random, finite, and make some tokens likelier than others.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import command_parser
from llama_core.files.meta_params import config_from_params
from llama_core.model.config import ModelConfig
from llama_core.model.weights import EMBEDDING, OUTPUT, WeightSpec, weight_specs


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of params.json except the vocabulary, and the context length of Hugging Face's config.json."""

    params: dict[str, Any]
    max_seq_len: int


def _shape(dim: int, layers: int, heads: int, kv_heads: int, multiple: int, max_seq_len: int, **more: float) -> Shape:
    sizes = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "multiple_of": multiple}
    return Shape(sizes | {"norm_eps": 1e-5} | more, max_seq_len)


SHAPES = {
    "tiny": _shape(64, 2, 4, 2, 32, 512),
    "llama-110m": _shape(768, 12, 12, 12, 32, 1024),
    "llama-1.1b": _shape(2048, 22, 32, 4, 256, 2048),
    "llama-3.2-1b": _shape(2048, 16, 32, 8, 256, 8192, ffn_dim_multiplier=1.5, rope_theta=500000.0),
    "llama-2-7b": _shape(4096, 32, 32, 32, 256, 4096),
    "llama-3-8b": _shape(4096, 32, 32, 8, 1024, 8192, ffn_dim_multiplier=1.3, rope_theta=500000.0),
}


def random_weights(config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Norms near 1; other weights keep outputs about as large as inputs. Generated on a GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, spec in weight_specs(config).items():
        shape = spec.shape
        weight = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 1:
            weight = 1 + 0.1 * weight
        elif name != EMBEDDING:
            weight *= shape[1] ** -0.5
        if name == OUTPUT:
            weight *= 2  # otherwise all logits would be nearly equal
        weights[name] = weight.to(dtype).cpu()
    return weights


def shard(
    weights: dict[str, torch.Tensor], specs: Mapping[str, WeightSpec], rank: int, num_shards: int
) -> dict[str, torch.Tensor]:
    """The contents of consolidated.<rank>.pth of `num_shards`."""
    part = {}
    for name, weight in weights.items():
        rank_dim = specs[name].rank_dim
        if num_shards > 1 and rank_dim is not None:
            weight = weight.chunk(num_shards, dim=rank_dim)[rank].clone()
        part[name] = weight
    return part


def write_meta(
    directory: Path, shape: Shape, weights: dict[str, torch.Tensor], tokenizer: Path | None, num_shards: int = 1
) -> None:
    """consolidated.NN.pth, params.json, tokenizer.model."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = weight_specs(config_from_params(shape.params, vocab_size=len(weights[OUTPUT])))
    for rank in range(num_shards):
        torch.save(shard(weights, specs, rank, num_shards), directory / f"consolidated.{rank:02}.pth")
    (directory / "params.json").write_text(json.dumps(shape.params | {"vocab_size": -1}) + "\n")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.model")


def hf_config(shape: Shape, config: ModelConfig) -> dict[str, Any]:
    """The contents of Hugging Face's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def write_hf(
    directory: Path, shape: Shape, config: ModelConfig, weights: dict[str, torch.Tensor], tokenizer: Path
) -> None:
    """model.safetensors, config.json and the tokenizer's files; tokenizer.json too where transformers is installed."""
    from safetensors.torch import save_file  # missing where GPUs are measured

    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(_hf_weights(config, weights)), directory / "model.safetensors", metadata={"format": "pt"})
    described = hf_config(shape, config)
    (directory / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    shutil.copyfile(tokenizer, directory / "tokenizer.model")
    told = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": shape.max_seq_len,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(told, indent=1) + "\n")
    _write_tokenizer_json(directory)


def _hf_weights(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights under their other names, queries and keys in that format's order of rows."""
    specs = weight_specs(config)
    for name, weight in weights.items():
        if specs[name].is_rotated:
            # Meta's rotary embedding rotates the pairs (2i, 2i + 1) of a head, Hugging Face's (i, i + head_dim / 2).
            pairs = weight.view(-1, config.head_dim // 2, 2, config.dim)
            weight = pairs.transpose(1, 2).reshape(weight.shape).contiguous()
        yield specs[name].hugging_face, weight


def _write_tokenizer_json(directory: Path) -> None:
    """Some peers need tokenizer.json; only transformers can make it."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        print("no tokenizer.json: transformers is not installed here")
        return
    AutoTokenizer.from_pretrained(directory).backend_tokenizer.save(str(directory / "tokenizer.json"))


def main(argv: Sequence[str]) -> None:
    parser = command_parser("make_checkpoint", __doc__)
    parser.add_argument("names", nargs="+", choices=SHAPES, metavar="NAME", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.model: SentencePiece's or Llama 3's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", nargs="+", choices=("meta", "hf"), default=["meta"])
    parser.add_argument("--shards", type=int, default=1, help="files of Meta's format")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    from llama_core.text.registry import load_tokenizer

    vocab_size = load_tokenizer(options.tokenizer).n_words
    for name in options.names:
        shape = SHAPES[name]
        config = config_from_params(shape.params, vocab_size=vocab_size, source=name)
        weights = random_weights(config, getattr(torch, options.dtype), options.seed)
        if "meta" in options.format:
            write_meta(options.out / name / "meta", shape, weights, options.tokenizer, options.shards)
        if "hf" in options.format:
            write_hf(options.out / name / "hf", shape, config, weights, options.tokenizer)
        count = sum(weight.numel() for weight in weights.values())
        print(f"{name}: {count:,} weights of {options.dtype} in {options.out / name}")
