"""What a model is (params.json) and what an engine is given. Frozen, validated field by field, no torch."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from llama_core.checkpoint.digest import CheckpointDigest
from llama_core.checkpoint.manifest import Manifest
from llama_core.errors import ConfigError

# Proposed tokens of one step at most: so many more rows still cost a CPU less than a step of their own.
MAX_DRAFTS = 8

# Tokens of one step at most, where nobody says otherwise: a burst of prompts is read in few steps.
DEFAULT_STEP_TOKENS = 2048

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
BackendName = Literal["auto", "native", "fused", "torch"]
Quantization = Literal["none", "int8"]
PrefixCacheScope = Literal["key", "all"]

# Llama's largest has 126; names of weights are listed for each.
_MAX_LAYERS = 10_000
_MAX_SIZE = 2**31 - 1
_SHOWN_CHARS = 80  # of a value at fault

# Written by some releases of Meta's checkpoints; they do not change the model.
_IGNORED_FIELDS = frozenset({"max_batch_size", "max_seq_len", "model_parallel_size", "dtype"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture, as Meta's params.json states it (Llama 2, Code Llama, Llama 3's shape without rope scaling)."""

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer: multiple_of * ceil(int(ffn_dim_multiplier * int(2 * 4 * dim / 3)) / multiple_of)."""
        hidden = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return self.multiple_of * math.ceil(hidden / self.multiple_of)

    @classmethod
    def from_params(cls, params: dict[str, Any], *, vocab_size: int, source: str = "params.json") -> "ModelConfig":
        """Read params.json's fields. `vocab_size` is the tokenizer's, which decides where params.json says -1.

        Raises ConfigError that names the field.
        """
        given = {key: value for key, value in params.items() if value is not None and key not in _IGNORED_FIELDS}
        known = {f.name for f in fields(cls)}
        for key in given:
            if key == "use_scaled_rope":
                if given[key]:
                    raise ConfigError(
                        f"{source}: use_scaled_rope (Llama 3.1's scaled rotary embedding) is not supported"
                    )
            elif key not in known:
                raise ConfigError(f"{source}: unknown field {_shown(key)}")
        given.pop("use_scaled_rope", None)

        def integer(name: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
            value = given.get(name, default)
            if value is None:
                raise ConfigError(f"{source}: field {name!r} is missing")
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
                what = f"a positive integer, at most {most}"
                raise ConfigError(f"{source}: field {name!r} must be {what}, is {_shown(value)}")
            return value

        def number(name: str, default: float | None) -> float | None:
            value = given.get(name, default)
            if value is None:
                return None
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= sys.float_info.max:  # nor NaN; an int may be larger than any float
                raise ConfigError(f"{source}: field {name!r} must be a positive finite number, is {_shown(value)}")
            return float(value)

        declared_vocab = given.pop("vocab_size", -1)
        if declared_vocab != -1:
            given["vocab_size"] = declared_vocab
            declared_vocab = integer("vocab_size")
            if declared_vocab != vocab_size:
                raise ConfigError(
                    f"{source}: vocab_size is {declared_vocab}, but the tokenizer has {vocab_size} tokens: "
                    "tokenizer and checkpoint belong to different models"
                )
        n_heads = integer("n_heads")
        config = cls(
            dim=integer("dim"),
            n_layers=integer("n_layers", most=_MAX_LAYERS),
            n_heads=n_heads,
            vocab_size=vocab_size,
            n_kv_heads=integer("n_kv_heads", n_heads),
            multiple_of=integer("multiple_of", 256),
            ffn_dim_multiplier=number("ffn_dim_multiplier", None),
            norm_eps=number("norm_eps", 1e-5) or 1e-5,
            rope_theta=number("rope_theta", 10000.0) or 10000.0,
        )
        if config.dim % config.n_heads:
            raise ConfigError(f"{source}: dim {config.dim} is not divisible by n_heads {config.n_heads}")
        if config.n_heads % config.n_kv_heads:
            raise ConfigError(f"{source}: n_heads {config.n_heads} is not divisible by n_kv_heads {config.n_kv_heads}")
        if config.head_dim % 2:
            raise ConfigError(f"{source}: dim / n_heads is {config.head_dim}, rotary embedding needs an even number")
        # Each is in its range; the feed-forward width is what comes of them together.
        width = (config.ffn_dim_multiplier or 1.0) * config.dim * 8 / 3
        if not (1 <= width <= _MAX_SIZE and config.hidden_dim < _MAX_SIZE):
            raise ConfigError(
                f"{source}: ffn_dim_multiplier, dim and multiple_of make a feed-forward width that is not from 1 to {_MAX_SIZE}"
            )
        return config

    def check_world_size(self, world_size: int) -> None:
        """Raise ConfigError unless every sharded dimension divides by the number of ranks."""
        sharded = {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "dim": self.dim,
            "vocab_size": self.vocab_size,
            "the feed-forward width": self.hidden_dim,
        }
        for name, size in sharded.items():
            if size % world_size:
                raise ConfigError(
                    f"model_parallel_size {world_size} does not divide {name} ({size}) of this checkpoint",
                    param="model_parallel_size",
                )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def read_params(ckpt_dir: str | Path, *, vocab_size: int) -> ModelConfig:
    """Read and validate `ckpt_dir`/params.json. Raises ConfigError that names the file and the field."""
    path = Path(ckpt_dir) / "params.json"
    try:
        params = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(params, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return ModelConfig.from_params(params, vocab_size=vocab_size, source=str(path))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that a rank needs to load and run its share. Plain and picklable: it crosses processes and nodes.

    vocab_size: the tokenizer's number of tokens. max_seq_len: prompt + generated tokens of one sequence at most.
    max_batch_size: sequences that run at once (slots). max_step_tokens: tokens of one step at most; a longer prompt is
    prefilled in chunks of what the running decodes leave of it. block_size: tokens in one block of the cache.
    kv_cache_bytes: cache memory of one rank; None takes what a full batch of full-length sequences needs, bounded by a
    share of what is free. verify_checksums: compare every shard's bytes with the CRC-32 that its archive states.
    manifest: the SHA-256 that params.json and the shards must have, before any of them is looked into.
    wants_digest: compute the digest of the checkpoint's contents even if all ranks see the same files. verified: files
    (`checkpoint.files.identity`) whose manifest and checksums have been verified, with their digest: no rank reads them
    again for that. expected: the contents that the first ranks loaded; ranks with any others refuse to load.
    speculation: let a step check tokens that repeat earlier ones. prefix_caching: compute a shared prefix once. Neither
    changes a request's tokens. prefix_cache_scope: which requests share cached blocks where API keys are configured: those of
    one key, or all. backend: what computes: "native" (C++) on a CPU, "fused" (CUDA graphs) on a GPU, or
    "torch"; "auto" is native on a CPU where it can be built. quantization: "int8" keeps the weights of linear layers as
    8-bit integers, one scale an output.
    """

    ckpt_dir: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    block_size: int = 16
    device: Device = "auto"
    dtype: DType = "auto"
    kv_cache_bytes: int | None = None
    verify_checksums: bool = True
    manifest: Manifest | None = None
    wants_digest: bool = False
    verified: Mapping[int, CheckpointDigest | None] = field(default_factory=dict)
    expected: CheckpointDigest | None = None
    speculation: bool = True
    prefix_caching: bool = True
    prefix_cache_scope: PrefixCacheScope = "key"
    backend: BackendName = "auto"
    quantization: Quantization = "none"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq_len", "max_batch_size", "max_step_tokens", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, is {value!r}", param=name)
        if self.max_seq_len < 2:
            raise ConfigError(
                "max_seq_len must be at least 2: a token of prompt and one that is generated", param="max_seq_len"
            )
        if self.max_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_batch_size ({self.max_batch_size}): "
                "every running sequence decodes one token a step",
                param="max_step_tokens",
            )
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ConfigError("kv_cache_bytes must be positive", param="kv_cache_bytes")
        if self.device not in get_args(Device):
            raise ConfigError(f"device must be one of {', '.join(get_args(Device))}", param="device")
        if self.backend not in get_args(BackendName):
            raise ConfigError(f"backend must be one of {', '.join(get_args(BackendName))}", param="backend")
        if self.quantization not in get_args(Quantization):
            raise ConfigError(f"quantization must be one of {', '.join(get_args(Quantization))}", param="quantization")
        if self.prefix_cache_scope not in get_args(PrefixCacheScope):
            raise ConfigError(
                f"prefix_cache_scope must be one of {', '.join(get_args(PrefixCacheScope))}", param="prefix_cache_scope"
            )
        if self.dtype not in get_args(DType):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(DType))}", param="dtype")

    @property
    def blocks_per_sequence(self) -> int:
        return math.ceil(self.max_seq_len / self.block_size)

    @property
    def max_drafts(self) -> int:
        """Tokens that the rows of one step may propose, all together."""
        return MAX_DRAFTS if self.speculation else 0

    @property
    def max_step_draws(self) -> int:
        """Tokens that one step draws at most: one a row, and one more for each draft."""
        return self.max_batch_size + self.max_drafts
