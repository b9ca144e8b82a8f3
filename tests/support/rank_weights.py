"""A rank's weights without a weight format."""

from collections.abc import Iterator

import torch

from llama_core.files.source import WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.weights.loader import Progress, planned_weights


def rank_weights(
    reader: WeightReader,
    config: ModelConfig,
    share: RankShare,
    dtype: torch.dtype,
    on_progress: Progress = lambda done, total: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `planned_weights` in the memory of the host, all dense."""
    for name, weight in planned_weights(reader, config, share, dtype, torch.device("cpu"), on_progress=on_progress):
        assert isinstance(weight, torch.Tensor)
        yield name, weight
