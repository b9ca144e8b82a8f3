"""Loads one rank's part of every weight from a checkpoint of any format, and refuses values that are not finite."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from llama_core.errors import CheckpointError
from llama_core.files.source import Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weight_formats import CODINGS, Coding
from llama_core.model.weights import Box, weight_specs
from llama_core.weights.uploads import Uploads

Part = TypeVar("Part")
Progress = Callable[[int, int], None]  # called with (bytes done, bytes in all)


class GroupedWeight(NamedTuple):
    """A matrix [n, k] in the groups in which the checkpoint stores it. See `GroupedSlice`.

    codes: uint8 or int8 [n, k]. scales: float32 [n, groups]. minima: the same, None in codings without.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None


def dense(weight: GroupedWeight, coding: Coding) -> torch.Tensor:
    """float32 [n, k]."""
    codes = weight.codes.view(len(weight.codes), -1, coding.group)
    values = torch.tensor(coding.table, dtype=torch.float32)[codes.int()] if coding.table else codes.float()
    if coding.middle:
        values -= coding.middle
    values *= weight.scales.unsqueeze(-1)
    if weight.minima is not None:
        values += weight.minima.unsqueeze(-1)
    return values.flatten(1)


def planned_weights(
    reader: WeightReader,
    config: ModelConfig,
    share: RankShare,
    dtype: torch.dtype,
    device: torch.device,
    coding_of: Callable[[str], str | None] = lambda name: None,
    quantizes: Callable[[str], bool] = lambda name: False,
    on_progress: Progress = lambda done, total: None,
    uploads: Uploads | None = None,
) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    """(name, the part of a rank) of every weight in the model's order, as `dtype` on `device`.

    Weights to which `coding_of` gives a coding are read in it. Weights that `quantizes` names are
    float32, because codes of rounded values would be others. on_progress: bytes as if all were in `dtype`.

    uploads: of `device` if absent.

    Peak memory: the weights that the caller keeps, one weight and one slice. Raises CheckpointError for a value that is not
    finite: on a CPU before it yields the weight, on a GPU after the last weight, because each check makes the host wait.
    """
    total = sum(math.prod(spec.part(share).shape) for spec in weight_specs(config).values()) * dtype.itemsize
    done = 0
    checks: list[_PendingCheck] = []
    with uploads or Uploads(device) as uploads:
        for name, spec in weight_specs(config).items():
            box = spec.part(share)
            if (coding := coding_of(name)) is not None:
                yield name, _read_groups(reader, name, box, coding, device, uploads)
                done += math.prod(box.shape) * dtype.itemsize
                on_progress(done, total)
                continue
            held = torch.float32 if quantizes(name) else dtype
            weight = torch.empty(box.shape, dtype=held, device=device)
            pieces: list[Path] = []
            extremes: list[torch.Tensor] = []
            for piece in reader.slices(name, box):
                target = weight[_region(piece)]
                uploads.copy(target, piece)
                pieces.append(piece.file)
                if not uploads.are_asynchronous:  # while the caches hold the slice
                    extremes.append(_extremes(target))
                done += target.numel() * dtype.itemsize
                on_progress(done, total)
            uploads.flush()
            if uploads.are_asynchronous and pieces:
                checks.append(_PendingCheck(name, box, held, _extremes(weight)))
            elif (at_fault := _first_not_finite(pieces, extremes)) is not None:
                raise _not_finite(at_fault, name, held)
            yield name, weight
    _raise_at_first_not_finite(reader, checks)


def _region(piece: Slice) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(piece.start, piece.values.shape, strict=True))


def _extremes(values: torch.Tensor) -> torch.Tensor:
    """[2]: the least and the greatest value, NaN if any value is. Computing them, unlike a sum, needs no memory.

    Of the copy, because a finite value of the file may overflow float16.
    """
    return torch.stack(torch.aminmax(values))


class _PendingCheck(NamedTuple):
    """The part of a weight as `held`, and its extremes on the device, which the host has not read."""

    name: str
    box: Box
    held: torch.dtype
    extremes: torch.Tensor


def _raise_at_first_not_finite(reader: WeightReader, checks: list[_PendingCheck]) -> None:
    """Raises CheckpointError for the first weight with a value that is not finite, whose slices are read once more to name
    the file. Waits for the device once."""
    at_fault = _first_not_finite(checks, [check.extremes for check in checks])
    if at_fault is None:
        return
    files: list[Path] = []
    extremes: list[torch.Tensor] = []
    for piece in reader.slices(at_fault.name, at_fault.box):
        files.append(piece.file)
        extremes.append(_extremes(piece.values.to(at_fault.held)))
    raise _not_finite(_first_not_finite(files, extremes) or files[0], at_fault.name, at_fault.held)


def _first_not_finite(parts: Sequence[Part], extremes: list[torch.Tensor]) -> Part | None:
    """The first of `parts` whose extremes are not finite."""
    is_finite = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
    return None if all(is_finite) else parts[is_finite.index(False)]


def _not_finite(file: Path, name: str, held: torch.dtype) -> CheckpointError:
    return CheckpointError(f"{file}: {name} holds a value that is not finite as {held} (NaN or infinity)")


def _read_groups(
    reader: WeightReader, name: str, box: Box, coding: str, device: torch.device, uploads: Uploads
) -> GroupedWeight:
    (rows, columns), group = box.shape, CODINGS[coding].group
    codes: torch.Tensor | None = None
    scales = torch.empty((rows, columns // group), device=device)
    minima: torch.Tensor | None = None
    for part in reader.grouped_slices(name, box, coding):
        if codes is None:
            codes = torch.empty((rows, columns), dtype=part.codes.dtype, device=device)
            minima = None if part.minima is None else torch.empty_like(scales)
        piece = Slice(part.file, part.codes, part.start)
        uploads.copy(codes[_region(piece)], piece)
        row, column = part.start
        for target, values in ((scales, part.scales), (minima, part.minima)):
            if target is None or values is None:
                continue
            if not torch.stack(torch.aminmax(values)).isfinite().all():
                raise CheckpointError(f"{part.file}: {name} holds a scale or minimum that is not finite")
            groups = Slice(part.file, values, (row, column // group))
            uploads.copy(target[_region(groups)], groups)
    assert codes is not None
    uploads.flush()
    return GroupedWeight(codes, scales, minima)
