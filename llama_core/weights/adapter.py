"""One rank's part of a LoRA adapter's matrices."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama_core.errors import CheckpointError, LlamaError
from llama_core.files.adapter import WEIGHTS, Pair, open_adapter
from llama_core.files.hf.files import open_file
from llama_core.model_config import ModelConfig
from llama_core.model_weights import WeightSpec, weight_specs
from llama_core.rank_share import RankShare
from llama_core.weights.hf import interleaved

log = logging.getLogger(__name__)


class LowRank(NamedTuple):
    """The adapter's pair for the weight `name` on this rank: A [rank, inputs] and B [outputs, rank], as stored. The product of
    the weight with x grows by scale * B (A x)."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def read_adapter(folder: str, digest: str, model: ModelConfig, share: RankShare, max_rank: int) -> list[LowRank]:
    """Where the files have changed since they were checked, or cannot be read here: a pair that makes every result NaN, so that
    the adapter's own requests end with an error and no others do."""
    specs = weight_specs(model)
    try:
        adapter = open_adapter(folder, model, max_rank)
        if adapter.digest != digest:
            raise CheckpointError(f"{folder}: the adapter has changed since it was loaded: load it again")
        file = open_file(Path(folder) / WEIGHTS, "pt")
        return [
            LowRank(name, *_parts(file, pair, specs[name], model.head_dim, share), pair.scale)
            for name, pair in adapter.pairs.items()
        ]
    except LlamaError as error:
        log.error("requests with this adapter will fail: %s", error.message)
        name, spec = next((name, spec) for name, spec in specs.items() if spec.is_linear)
        outputs, inputs = spec.part(share).shape
        return [LowRank(name, torch.zeros(1, inputs), torch.full((outputs, 1), torch.nan), 1.0)]


def _parts(
    file: Any, pair: Pair, spec: WeightSpec, head_dim: int, share: RankShare
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of A and the rows of B that this rank's part of the weight has. Copies."""
    a, b = (file.get_tensor(each.name) for each in (pair.a, pair.b))
    if spec.is_rotated:
        b = interleaved(b, head_dim)
    (row, column), (rows, columns) = spec.part(share)
    return a[:, column : column + columns].contiguous(), b[row : row + rows].contiguous()
