"""Loads one rank's part of every weight from a checkpoint of any format, and refuses values that are not finite."""

from collections.abc import Callable, Iterator

import torch

from llama_core.checkpoint.source import WeightReader
from llama_core.checkpoint.weights import num_values, weight_specs
from llama_core.errors import CheckpointError
from llama_core.model_config import ModelConfig

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all)


def rank_weights(
    reader: WeightReader,
    config: ModelConfig,
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress = lambda done, total: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, the part of `rank` of `world_size` ranks) of every weight in the model's order, as `dtype` on `device`.

    Peak memory: the weights that the caller keeps, one weight and one slice. Raises CheckpointError for a value that is not
    finite.
    """
    total = num_values(config, rank, world_size) * dtype.itemsize
    done = 0
    for name, spec in weight_specs(config).items():
        box = spec.part(rank, world_size)
        weight = torch.empty(box.shape, dtype=dtype, device=device)
        for file, values, start in reader.slices(name, box):
            region = tuple(slice(begin, begin + size) for begin, size in zip(start, values.shape, strict=True))
            target = weight[region]
            target.copy_(values)
            # Checks the copy, because a finite value of the file may overflow float16. The least and the greatest value are
            # NaN if any value is; computing them, unlike a sum, needs no memory.
            if not torch.stack(torch.aminmax(target)).isfinite().all():
                raise CheckpointError(f"{file}: {name} holds a value that is not finite as {dtype} (NaN or infinity)")
            done += target.numel() * dtype.itemsize
            on_progress(done, total)
        yield name, weight
