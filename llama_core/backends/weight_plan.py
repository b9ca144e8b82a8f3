"""Decides the weight format of every matrix of a model. Reads no weight, loads no tensors.

A matrix is what a layer multiplies at once, the `tensor` of one or more weights.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from llama_core.files.source import DENSE, GROUP
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weight_formats import GROUPED
from llama_core.model.weights import WeightSpec, weight_specs


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The formats of a model's weights, by name. Equal on all ranks.

    dtype: of embeddings, norms and unquantized matrices. matrices: the format of each matrix, in the engine's order, from
    "layers.0.qkv" to "output". holders: the matrix of each weight that is part of one. stored: how the checkpoint
    stores each weight whose groups a matrix keeps. expanded: how the checkpoint stores each matrix that is held in dtype
    because no format has such codes, its parts differ, or the ranks' parts do not begin and end with groups.
    """

    dtype: str
    matrices: Mapping[str, str]
    holders: Mapping[str, str]
    stored: Mapping[str, str]
    expanded: Mapping[str, str] = field(default_factory=dict)

    def format_of(self, weight: str) -> str:
        """The format in which `weight` is held in memory."""
        return self.matrices[self.holders[weight]] if weight in self.holders else self.dtype

    def keeps_groups(self, weight: str) -> bool:
        """Whether the weight is read in the groups in which it is stored."""
        return weight in self.stored

    def quantizes(self, weight: str) -> bool:
        """Whether the weight is quantized while it is loaded."""
        return self.format_of(weight) != self.dtype and not self.keeps_groups(weight)

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
    config: ModelConfig, stored_format: Callable[[str], str], quantization: str, dtype: str, world_size: int
) -> WeightPlan:
    """stored_format: see `WeightReader`. quantization: one of QUANTIZATIONS. dtype: of the model."""
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
        groups = _common_groups(set(formats.values()))
        wanted = {"none": dtype, "auto": groups or dtype}.get(quantization, quantization)
        # Groups of int4 are groups of int4_min with the same values.
        can_keep = groups is not None and (groups == wanted or (groups, wanted) == ("int4", "int4_min"))
        if can_keep and not all(_holds_whole_groups(specs[name], share) for name in weights for share in shares):
            can_keep = False
            wanted = dtype if quantization == "auto" else wanted
        if can_keep:
            stored |= formats
        elif quantization == "auto" and (origins := set(formats.values()) - {DENSE}):
            expanded[matrix] = " + ".join(sorted(origins))
        matrices[matrix] = wanted
    return WeightPlan(dtype, matrices, holders, stored, expanded)


def _common_groups(formats: set[str]) -> str | None:
    """The format of groups that holds parts in all of `formats` without loss, None if there is none."""
    if len(formats) == 1:
        (only,) = formats
        return only if only in GROUPED else None
    return "int4_min" if formats == {"int4", "int4_min"} else None


def _holds_whole_groups(spec: WeightSpec, share: RankShare) -> bool:
    """Whether the rank's part of the weight begins and ends with a group of inputs."""
    box = spec.part(share)
    return box.start[1] % GROUP == box.shape[1] % GROUP == 0
