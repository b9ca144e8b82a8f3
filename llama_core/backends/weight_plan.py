"""Decides the weight format of every matrix of a model. Reads no weight, loads no tensors.

A matrix is what a layer multiplies at once, the `tensor` of one or more weights.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from llama_core.files.source import DENSE
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weight_formats import CODINGS, held_as
from llama_core.model.weights import WeightSpec, weight_specs


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The formats of a model's weights, by name. Equal on all ranks.

    dtype: of embeddings, norms and unquantized matrices. matrices: the format of each matrix, in the engine's order, from
    "layers.0.qkv" to "output". holders: the matrix of each weight that is part of one. stored: the coding in which each weight
    is read whose groups a matrix keeps. expanded: how the checkpoint stores each matrix that is held in another format,
    because the backend has no such codes, its parts differ, or the ranks' parts do not begin and end with groups.
    """

    dtype: str
    matrices: Mapping[str, str]
    holders: Mapping[str, str]
    stored: Mapping[str, str]
    expanded: Mapping[str, str] = field(default_factory=dict)

    def format_of(self, weight: str) -> str:
        """The format in which `weight` is held in memory."""
        return self.matrices[self.holders[weight]] if weight in self.holders else self.dtype

    def coding_of(self, weight: str) -> str | None:
        """One of CODINGS, in which the weight is read; None where its values are."""
        return self.stored.get(weight)

    def quantizes(self, weight: str) -> bool:
        """Whether the weight is quantized while it is loaded."""
        return self.format_of(weight) != self.dtype and weight not in self.stored

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of matrices, each once."""
        return tuple(dict.fromkeys(self.matrices.values()))

    @property
    def is_plain(self) -> bool:
        """Whether every matrix is held in the model's dtype."""
        return self.formats == (self.dtype,)

    def expand(self) -> "WeightPlan":
        """The plan that holds every matrix in the model's dtype."""
        return replace(self, matrices=dict.fromkeys(self.matrices, self.dtype), stored={})

    def __str__(self) -> str:
        """Such as "bfloat16 with int4 weights", "bfloat16 with int4_min (120 matrices), int8_groups (output)", or
        "bfloat16 with 84 matrices expanded from Q4_K, Q6_K"."""
        counts = Counter(self.matrices.values())
        parts = [f"{name} ({self._extent(name, counts[name])})" for name in counts if name != self.dtype]
        if len(self.formats) == 1 and parts:
            parts = [f"{self.formats[0]} weights"]
        if self.expanded:
            origins = ", ".join(dict.fromkeys(self.expanded.values()))
            parts.append(f"{len(self.expanded)} matrices expanded from {origins}")
        return f"{self.dtype} with {', '.join(parts)}" if parts else self.dtype

    def _extent(self, name: str, count: int) -> str:
        return (
            next(matrix for matrix, held in self.matrices.items() if held == name)
            if count == 1
            else f"{count} matrices"
        )


def plan_weights(
    config: ModelConfig,
    stored_format: Callable[[str], str],
    quantization: str,
    dtype: str,
    world_size: int,
    codings: Collection[str],
    rest: str,
) -> WeightPlan:
    """stored_format: see `WeightReader`. quantization: one of QUANTIZATIONS. dtype: of the model. codings: that the backend
    multiplies. rest: the format of quantized matrices that it holds in none of them."""
    specs = weight_specs(config)
    shares = [RankShare.of(config, rank, world_size) for rank in range(world_size)]
    holders = {name: spec.tensor for name, spec in specs.items() if spec.is_linear}
    parts: dict[str, list[str]] = {}
    for name, matrix in holders.items():
        parts.setdefault(matrix, []).append(name)
    matrices: dict[str, str] = {}
    stored: dict[str, str] = {}
    expanded: dict[str, str] = {}
    for matrix, weights in parts.items():
        formats = {name: stored_format(name) for name in weights}
        held = {name: held_as(each, codings) for name, each in formats.items()}
        together = [
            coding
            for coding in held[weights[0]]
            if all(coding in each for each in held.values())
            and all(_has_whole_groups(specs[name], share, coding) for name in weights for share in shares)
        ]
        if quantization == "auto":
            together, wanted = together[:1], dtype if DENSE in formats.values() else rest
        else:
            wanted = dtype if quantization == "none" else quantization
            together = [coding for coding in together if coding == wanted]
        if together:
            (wanted,) = together
            # A part without minima is read without them: (code - 8) * scale is the same with -8 * scale.
            stored |= {name: "int4" if wanted == "int4_min" and "int4" in held[name] else wanted for name in weights}
        elif quantization == "auto" and (origins := set(formats.values()) - {DENSE}):
            expanded[matrix] = " + ".join(sorted(origins))
        matrices[matrix] = wanted
    return WeightPlan(dtype, matrices, holders, stored, expanded)


def _has_whole_groups(spec: WeightSpec, share: RankShare, coding: str) -> bool:
    """Whether the rank's part of the weight begins and ends with a group of inputs."""
    box, group = spec.part(share), CODINGS[coding].group
    return box.start[1] % group == box.shape[1] % group == 0
