"""Reads an expert's weight that Hugging Face's files hold in MXFP4 (Open Compute Project, Microscaling Formats 1.0)."""

from collections.abc import Iterator
from typing import Final

import torch

from llama_core.files.source import GROUP
from llama_core.model.weight_formats import CODINGS
from llama_core.model.weights import Box
from llama_core.weights.loader import GroupedWeight, dense
from llama_core.weights.mapped import release

_CHUNK_VALUES: Final = 2**20  # of one part of a box: 4 MB as float32
_BIAS: Final = 128  # of scales, which are powers of two; codes stand for twice the values


class Mxfp4Weight:
    """blocks: uint8 [outputs, groups, 16], two codes of a group in each byte, the first one in its low half. scales: uint8
    [outputs, groups]. Both are mapped."""

    stored_format: Final = "mxfp4"

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        self._blocks, self._scales = blocks, scales

    def chunks(self, box: Box, unit: int) -> Iterator[Box]:
        """See `CodedWeight`."""
        step = max(1, _CHUNK_VALUES // (box.shape[1] * unit)) * unit
        for first in range(0, box.shape[0], step):
            rows = min(step, box.shape[0] - first)
            yield Box((box.start[0] + first, box.start[1]), (rows, box.shape[1]))
            release(self._blocks[box.start[0] + first : box.start[0] + first + rows])

    def values(self, box: Box) -> torch.Tensor:
        """float32 [rows, columns]."""
        (row, column), (rows, columns) = box
        begin, end = column // GROUP * GROUP, -(-(column + columns) // GROUP) * GROUP
        whole = self.groups(Box((row, begin), (rows, end - begin)), self.stored_format)
        return dense(whole, CODINGS[self.stored_format])[:, column - begin : column - begin + columns]

    def groups(self, box: Box, coding: str) -> GroupedWeight:
        """The box's columns are whole groups."""
        (row, column), (rows, columns) = box
        at = slice(row, row + rows), slice(column // GROUP, (column + columns) // GROUP)
        blocks = self._blocks[at]
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        return GroupedWeight(codes, (self._scales[at].float() - _BIAS).exp2(), None)
