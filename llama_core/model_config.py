"""The architecture of a model, as Meta's params.json states it. Frozen, validated field by field, no torch."""

import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llama_core.errors import ConfigError

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
