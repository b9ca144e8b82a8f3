"""One rank's part of a LoRA adapter's matrices."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama_core.errors import CheckpointError
from llama_core.files.adapter import WEIGHTS, Pair, open_adapter
from llama_core.files.hf.files import open_file
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weights import OUTPUT, WeightSpec, weight_specs
from llama_core.remote.store import local
from llama_core.weights.hf import interleaved


class LowRank(NamedTuple):
    """The adapter's pair for the weight `name` on this rank: A [rank, inputs] and B [outputs, rank], as stored. The product of
    the weight with x grows by scale * B (A x)."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def read_adapter(folder: str, digest: str, model: ModelConfig, share: RankShare, max_rank: int) -> list[LowRank]:
    """Raises CheckpointError where the files have changed since they were checked, and what reading a damaged file raises."""
    specs, folder = weight_specs(model), local(folder, "adapter")
    adapter = open_adapter(folder, model, max_rank)
    if adapter.digest != digest:
        raise CheckpointError(f"{folder}: the adapter has changed since it was loaded: load it again")
    file = open_file(Path(folder) / WEIGHTS, "pt")
    return [
        LowRank(name, *_parts(file, pair, specs[name], model, share), pair.scale)
        for name, pair in adapter.pairs.items()
    ]


def unreadable(model: ModelConfig, share: RankShare) -> list[LowRank]:
    """Pairs that make every result NaN, so that the requests of an adapter that cannot be read end with an error and no others
    do: in the first layer for the cache's sake, in the last because softmax may lose a NaN on the way."""
    specs = weight_specs(model)
    broken = []
    linear = [name for name, spec in specs.items() if spec.takes_adapters and name != OUTPUT]
    for name in (linear[0], linear[-1]):
        outputs, inputs = specs[name].part(share).shape
        broken.append(LowRank(name, torch.zeros(1, inputs), torch.full((outputs, 1), torch.nan), 1.0))
    return broken


def _parts(
    file: Any, pair: Pair, spec: WeightSpec, model: ModelConfig, share: RankShare
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of A and the rows of B that this rank's part of the weight has. Copies."""
    a, b = (file.get_tensor(each.name) for each in (pair.a, pair.b))
    b = b[spec.first_row : spec.first_row + spec.shape[0]]
    if spec.is_rotated:
        b = interleaved(b, model.head_dim, model.rope.rotated(model.head_dim))
    (row, column), (rows, columns) = spec.part(share)
    return a[:, column : column + columns].contiguous(), b[row : row + rows].contiguous()
