"""Loads one rank's part of every weight from a checkpoint of any format, and refuses values that are not finite."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.source import GROUP, WeightReader
from llama_core.checkpoint.uploads import Uploads
from llama_core.checkpoint.weights import Box, num_values, weight_specs
from llama_core.errors import CheckpointError
from llama_core.model_config import ModelConfig

Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all)


class GroupedWeight(NamedTuple):
    """A matrix [n, k] in the groups in which the checkpoint stores it, on the CPU. See `GroupedSlice`.

    codes: uint8 or int8 [n, k]. scales: float32 [n, k / GROUP]. minima: the same, None in formats without.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None


def rank_weights(
    reader: WeightReader,
    config: ModelConfig,
    share: RankShare,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress = lambda done, total: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `planned_weights`, all dense."""
    for name, weight in planned_weights(reader, config, share, dtype, device, on_progress=on_progress):
        assert isinstance(weight, torch.Tensor)
        yield name, weight


def planned_weights(
    reader: WeightReader,
    config: ModelConfig,
    share: RankShare,
    dtype: torch.dtype,
    device: torch.device,
    keeps_groups: Callable[[str], bool] = lambda name: False,
    quantizes: Callable[[str], bool] = lambda name: False,
    on_progress: Progress = lambda done, total: None,
) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    """(name, the part of a rank) of every weight in the model's order, as `dtype` on `device`.

    Weights that `keeps_groups` names are read in the groups in which they are stored. Weights that `quantizes` names are
    float32, because codes of rounded values would be others. on_progress: bytes as if all were in `dtype`.

    Peak memory: the weights that the caller keeps, one weight and one slice. Raises CheckpointError for a value that is not
    finite.
    """
    total = num_values(config, share) * dtype.itemsize
    done = 0
    uploads = Uploads(device)
    for name, spec in weight_specs(config).items():
        box = spec.part(share)
        if keeps_groups(name):
            yield name, _read_groups(reader, name, box)
            done += math.prod(box.shape) * dtype.itemsize
            on_progress(done, total)
            continue
        held = torch.float32 if quantizes(name) else dtype
        weight = torch.empty(box.shape, dtype=held, device=device)
        files: list[Path] = []
        extremes: list[torch.Tensor] = []
        for file, values, start in reader.slices(name, box):
            region = tuple(slice(begin, begin + size) for begin, size in zip(start, values.shape, strict=True))
            target = weight[region]
            uploads.copy(target, values)
            # Of the copy, because a finite value of the file may overflow float16. The least and the greatest value are NaN if
            # any value is; computing them, unlike a sum, needs no memory.
            files.append(file)
            extremes.append(torch.stack(torch.aminmax(target)))
            done += target.numel() * dtype.itemsize
            on_progress(done, total)
        # Once for a weight, because a GPU is waited for.
        is_finite = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
        if not all(is_finite):
            file = files[is_finite.index(False)]
            raise CheckpointError(f"{file}: {name} holds a value that is not finite as {held} (NaN or infinity)")
        yield name, weight


def _read_groups(reader: WeightReader, name: str, box: Box) -> GroupedWeight:
    rows, columns = box.shape
    codes: torch.Tensor | None = None
    scales = torch.empty((rows, columns // GROUP))
    minima: torch.Tensor | None = None
    for piece in reader.grouped_slices(name, box):
        row, column = piece.start
        if codes is None:
            codes = torch.empty((rows, columns), dtype=piece.codes.dtype)
            minima = None if piece.minima is None else torch.empty_like(scales)
        codes[row : row + len(piece.codes), column : column + piece.codes.shape[1]] = piece.codes
        groups = slice(column // GROUP, column // GROUP + piece.scales.shape[1])
        for target, values in ((scales, piece.scales), (minima, piece.minima)):
            if target is None or values is None:
                continue
            if not torch.stack(torch.aminmax(values)).isfinite().all():
                raise CheckpointError(f"{piece.file}: {name} holds a scale or minimum that is not finite")
            target[row : row + len(values), groups] = values
    assert codes is not None
    return GroupedWeight(codes, scales, minima)
