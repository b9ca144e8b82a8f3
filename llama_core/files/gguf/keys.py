"""Checked values of a GGUF file's metadata. Needs no torch; every error names the file and the key."""

import math
from collections.abc import Iterator
from typing import Final

from llama_core.errors import ConfigError
from llama_core.files.gguf.file import Value
from llama_core.files.gguf.model import GgufModel
from llama_core.files.json_fields import shown
from llama_core.model_config import MAX_LAYERS, MAX_SIZE

# Architecture -> whether its query and key rows have each head's halves side by side, as Hugging Face's models. The converter
# reorders those of "llama" to adjacent pairs, which is Meta's order and ours.
ARCHITECTURES: Final = {"llama": False, "qwen2": True, "qwen3": True}
# Keys that change the model, with the values that mean no change.
_NEUTRAL: Final[dict[str, tuple[Value, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}


class GgufKeys:
    """The metadata below the architecture's name. Raises ConfigError that names the file and the key."""

    def __init__(self, model: GgufModel) -> None:
        self._path = model.path
        self._metadata = model.metadata
        self.architecture = self._metadata.get("general.architecture")

    def refuse_unknown_models(self) -> None:
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(
                f"{self._path}: the architecture {shown(self.architecture)} is not supported; supported are {known}"
            )
        for name, neutral in _NEUTRAL.items():
            value = self.value(name)
            if value is not None and value not in neutral:
                raise self.fault(name, f"is {shown(value)}, which is not supported")

    def fault(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self.architecture}.{name} {what}")

    def value(self, name: str) -> Value | None:
        return self._metadata.get(f"{self.architecture}.{name}")

    def below(self, prefix: str) -> Iterator[str]:
        """The names below the architecture's that begin so."""
        whole = f"{self.architecture}."
        return (key.removeprefix(whole) for key in self._metadata if key.startswith(whole + prefix))

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A number, or a list of equal ones, one for each layer."""
        value = self.value(name)
        if isinstance(value, list) and len(value) <= MAX_LAYERS and len(set(value)) == 1:
            value = value[0]
        if value is None:
            value = default
        if value is None:
            raise self.fault(name, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.fault(name, f"must be a whole number from {least} to {most}, is {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.value(name)
        if value is None:
            value = default
        if value is None:
            raise self.fault(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fault(name, f"must be a positive finite number, is {shown(value)}")
        return float(value)

    def plain_integer(self, key: str) -> int:
        """A key outside the architecture's."""
        value = self._metadata[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            raise ConfigError(f"{self._path}: {key} must be a token's id, is {shown(value)}")
        return value
