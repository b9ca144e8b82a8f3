"""Reads a weight that Hugging Face's files hold in codes, from maps of its tensors. Knows no method: it follows a `Coding`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import torch

from llama_core.errors import CheckpointError
from llama_core.files.hf.coding import Coding, Part
from llama_core.files.source import GROUP
from llama_core.model.weight_formats import CODINGS, WIDE
from llama_core.model.weights import Box
from llama_core.weights.loader import GroupedWeight
from llama_core.weights.mapped import release, row_chunks

_CHUNK_VALUES = 2**20  # of one part of a box: 4 MB as float32
_FLOATS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # by their bytes


class CodedWeight:
    """The tensors of one weight [outputs, inputs], whose headers have been checked."""

    def __init__(self, name: str, coding: Coding, shape: tuple[int, ...], tensors: Mapping[str, torch.Tensor]) -> None:
        """name: for errors. tensors: mapped, by their names in the layer. Raises CheckpointError for numbers that contradict
        the shape."""
        self._coding, self._shape = coding, shape
        self._tensors = {
            part: tensors[part.name].reshape(size) for part, size in coding.parts(shape) if part.name in tensors
        }
        if coding.shape is not None and (said := self._tensors[coding.shape].tolist()) != list(shape):
            raise CheckpointError(f"{name}.{coding.shape.name} is {said}, expected {list(shape)}")
        self._scattered: torch.Tensor | None = None  # the block of each input, where blocks are not neighbours
        if (part := coding.groups) is not None and part in self._tensors:
            found, (_, num_blocks) = self._tensors[part].clone(), coding.blocks(shape)
            # compressed-tensors has -1 where the inputs were not ordered.
            in_order = (found == -1).all() or torch.equal(found.long(), self._block_of(torch.arange(shape[1])))
            if not in_order:
                if not 0 <= int(found.min()) <= int(found.max()) < num_blocks:
                    raise CheckpointError(f"{name}.{part.name} names a group outside of the {num_blocks} there are")
                self._scattered = found
            self._coding = replace(coding, is_scattered=not in_order)

    @cached_property
    def stored_format(self) -> str:
        """See `WeightReader.stored_format`. Reads zeros and scales."""
        coding = self._coding
        if coding.is_symmetric and coding.zeros is not None:
            zeros = self._numbers(coding.zeros, Box((0, 0), coding.blocks(self._shape)))
            coding = replace(coding, is_symmetric=bool((zeros == 1 << (coding.bits - 1)).all()))
        found = coding.stored_format(self._shape[1])
        is_held = found == str(coding) or _half_holds(self._tensors[coding.scales])
        return found if is_held else found + WIDE

    def chunks(self, box: Box, unit: int) -> Iterator[Box]:
        """`box` in parts of about _CHUNK_VALUES, which have whole units of rows, or all rows. Releases a part's pages when the
        next is requested."""
        dim, unit = (1, GROUP) if self._coding.codes.is_turned else (0, unit)  # the first one in the file
        step = max(1, _CHUNK_VALUES // (box.shape[1 - dim] * unit)) * unit
        for first in range(0, box.shape[dim], step):
            start, shape = list(box.start), list(box.shape)
            start[dim], shape[dim] = start[dim] + first, min(step, shape[dim] - first)
            yield (chunk := Box(tuple(start), tuple(shape)))
            release(self._stored(self._coding.codes, chunk))
        for tensor in self._tensors.values():
            release(tensor)

    def values(self, box: Box) -> torch.Tensor:
        """float32 [rows, columns]."""
        (row, column), (rows, columns) = box
        scales, zeros = self._blocks(range(row, row + rows), torch.arange(column, column + columns))
        codes = self._numbers(self._coding.codes, box)
        if self._coding.is_float:  # a third of the time of torch's conversion
            codes = _FLOATS.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)
        return codes.float().sub_(zeros).mul_(scales)

    def groups(self, box: Box, coding: str) -> GroupedWeight:
        """In a coding that holds the weight's `stored_format`. The box's columns are whole groups."""
        (row, column), (rows, columns) = box
        scales, zeros = self._blocks(
            range(row, row + rows), torch.arange(column, column + columns, CODINGS[coding].group)
        )
        codes = self._numbers(self._coding.codes, box)
        if CODINGS[coding].bits == 8:  # modulo 256: bytes from 0 to 255 less 128, too
            by_group = codes.view(torch.int8).reshape(rows, -1, CODINGS[coding].group)
            codes = by_group.sub(zeros.short().to(torch.int8).unsqueeze(-1)).flatten(1)
        minima = (zeros * -scales).expand_as(scales) if CODINGS[coding].has_minima else None
        return GroupedWeight(codes, scales, minima)

    def _block_of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The number of the block of each input."""
        if self._scattered is not None:
            return self._scattered[inputs]
        width = self._coding.block[1]
        return inputs // width if width else torch.zeros_like(inputs)

    def _blocks(self, rows: range, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and the zero of each row and column, as float32 [rows, columns]."""
        height, of_columns = self._coding.block[0], self._block_of(columns)
        of_rows = torch.tensor(rows) // height if height else torch.zeros(len(rows), dtype=torch.long)
        (row, column), (last_row, last_column) = (of_rows[0], of_columns.min()), (of_rows[-1], of_columns.max())
        box = Box((int(row), int(column)), (int(last_row - row) + 1, int(last_column - column) + 1))

        def spread(part: Part) -> torch.Tensor:
            blocks = self._numbers(part, box).float().index_select(1, of_columns - column)
            return blocks if height == 1 else blocks.index_select(0, of_rows - row)

        zeros = self._coding.zeros
        zero = torch.full((1, 1), float(self._coding.zero)) if zeros is None else spread(zeros)
        return spread(self._coding.scales), zero

    def _numbers(self, part: Part, box: Box) -> torch.Tensor:
        """[rows, columns] of a part, in the weight's orientation: as stored, or codes as uint8 where words hold several."""
        stored = self._stored(part, box)
        words = stored.T if part.is_turned else stored
        if part.packed is None:
            return words.contiguous()
        bits, a_word = self._coding.bits, 32 // self._coding.bits
        if part is self._coding.zeros:
            words = words + self._coding.word  # carries on from zero to zero, modulo 2^32
        in_bytes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        first = box.start[part.packed] % a_word
        if part.packed == 1:
            codes = in_bytes if bits == 8 else torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(1)
            return codes[:, first : first + box.shape[1]]
        in_bytes = in_bytes.view(*words.shape, 4)
        codes = torch.empty((len(words) * a_word, words.shape[1]), dtype=torch.uint8)
        for place, row in enumerate(part.order or range(a_word)):
            byte = in_bytes[..., place * bits // 8]
            codes[row::a_word] = byte if bits == 8 else byte >> 4 if place % 2 else byte & 15
        return codes[first : first + box.shape[0]]

    def _stored(self, part: Part, box: Box) -> torch.Tensor:
        """The region of the mapped tensor, as the file has it, that holds a box; whole words."""
        ranges = [slice(begin, begin + size) for begin, size in zip(*box, strict=True)]
        if part.packed is not None:
            span, a_word = ranges[part.packed], 32 // self._coding.bits
            ranges[part.packed] = slice(span.start // a_word, -(-span.stop // a_word))
        return self._tensors[part][tuple(ranges[::-1] if part.is_turned else ranges)]


def _half_holds(scales: torch.Tensor) -> bool:
    """Whether all are exact in float16. False for NaN."""
    for begin, end in row_chunks(scales):
        some = scales[begin:end].float()
        release(scales[begin:end])
        if not (some == some.half().float()).all():
            return False
    return True
