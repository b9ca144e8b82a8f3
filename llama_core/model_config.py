"""The architecture of a model, read from Meta's params.json. Frozen, validated field by field, no torch."""

import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llama_core.errors import ConfigError

_MAX_LAYERS = 10_000  # Llama's largest model has 126; the server lists the names of every layer's weights
_MAX_SIZE = 2**31 - 1
_SHOWN_CHARS = 80  # of an invalid value, in error messages

# Some releases of Meta's checkpoints contain these fields; they do not change the model.
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
        """Read the fields of params.json. `vocab_size` is the tokenizer's, which counts where params.json says -1.

        Raises ConfigError that names the field.
        """
        given = _Params(params, source, {f.name for f in fields(cls)})
        given.check_vocab_size(vocab_size)
        n_heads = given.integer("n_heads")
        config = cls(
            dim=given.integer("dim"),
            n_layers=given.integer("n_layers", most=_MAX_LAYERS),
            n_heads=n_heads,
            vocab_size=vocab_size,
            n_kv_heads=given.integer("n_kv_heads", n_heads),
            multiple_of=given.integer("multiple_of", 256),
            ffn_dim_multiplier=given.number("ffn_dim_multiplier"),
            norm_eps=given.number("norm_eps") or 1e-5,
            rope_theta=given.number("rope_theta") or 10000.0,
        )
        config._check_shape(source)
        return config

    def _check_shape(self, source: str) -> None:
        """Raises ConfigError for fields that are each in range but do not make a model together."""
        if self.dim % self.n_heads:
            raise ConfigError(f"{source}: dim {self.dim} is not divisible by n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"{source}: n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"{source}: dim / n_heads is {self.head_dim}, rotary embedding needs an even number")
        width = (self.ffn_dim_multiplier or 1.0) * self.dim * 8 / 3
        if not (1 <= width <= _MAX_SIZE and self.hidden_dim < _MAX_SIZE):
            raise ConfigError(
                f"{source}: ffn_dim_multiplier, dim and multiple_of make a feed-forward width that is not from 1 to {_MAX_SIZE}"
            )

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError unless every sharded dimension divides by the number of ranks."""
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


class _Params:
    """The fields of params.json that describe the model. Raises ConfigError that names a field at fault."""

    def __init__(self, params: dict[str, Any], source: str, known: set[str]) -> None:
        self._source = source
        self._given = {key: value for key, value in params.items() if value is not None and key not in _IGNORED_FIELDS}
        if self._given.pop("use_scaled_rope", False):
            raise ConfigError(f"{source}: use_scaled_rope (Llama 3.1's scaled rotary embedding) is not supported")
        for key in self._given:
            if key not in known:
                raise ConfigError(f"{source}: unknown field {_shown(key)}")

    def integer(self, name: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        value = self._given.get(name, default)
        if value is None:
            raise ConfigError(f"{self._source}: field {name!r} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            expected = f"a positive integer, at most {most}"
            raise ConfigError(f"{self._source}: field {name!r} must be {expected}, is {_shown(value)}")
        return value

    def number(self, name: str) -> float | None:
        value = self._given.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:  # nor NaN; an int may be larger than any float
            raise ConfigError(f"{self._source}: field {name!r} must be a positive finite number, is {_shown(value)}")
        return float(value)

    def check_vocab_size(self, vocab_size: int) -> None:
        if self._given.get("vocab_size", -1) == -1:
            return
        declared = self.integer("vocab_size")
        if declared != vocab_size:
            raise ConfigError(
                f"{self._source}: vocab_size is {declared}, but the tokenizer has {vocab_size} tokens: "
                "tokenizer and checkpoint belong to different models"
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
