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
        pieces: list[tuple[Path, torch.Tensor]] = []
        extremes: list[torch.Tensor] = []
        for file, values, start in reader.slices(name, box):
            region = tuple(slice(begin, begin + size) for begin, size in zip(start, values.shape, strict=True))
            target = weight[region]
            uploads.copy(target, values)
            pieces.append((file, target))
            if device.type == "cpu":  # while the caches hold the slice
                extremes.append(_extremes(target))
            done += target.numel() * dtype.itemsize
            on_progress(done, total)
        at_fault = _first_not_finite(weight, pieces, extremes)
        if at_fault is not None:
            raise CheckpointError(f"{at_fault}: {name} holds a value that is not finite as {held} (NaN or infinity)")
        yield name, weight


def _extremes(values: torch.Tensor) -> torch.Tensor:
    """[2]: the least and the greatest value, NaN if any value is. Computing them, unlike a sum, needs no memory.

    Of the copy, because a finite value of the file may overflow float16.
    """
    return torch.stack(torch.aminmax(values))


def _first_not_finite(
    weight: torch.Tensor, pieces: list[tuple[Path, torch.Tensor]], extremes: list[torch.Tensor]
) -> Path | None:
    """The file of the first of `pieces` with a value that is not finite. extremes: of the pieces; without any, one look at the
    whole weight tells, for which the host waits for a GPU once."""
    if not pieces:
        return None
    if not extremes:
        if bool(_extremes(weight).isfinite().all()):
            return None
        extremes = [_extremes(target) for _, target in pieces]
    is_finite = torch.stack(extremes).isfinite().all(1).tolist()
    return None if all(is_finite) else pieces[is_finite.index(False)][0]


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
