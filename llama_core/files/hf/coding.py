"""How Hugging Face's files store the weights of a quantized linear layer: the record that plans and readers follow.

A module of `methods/` makes it of a quantization_config, `weights/coded.py` reads its tensors. Needs no torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from llama_core.files.hf.files import Located
from llama_core.files.source import GROUP
from llama_core.model.fields import shown

LONG_GROUP: Final = 128  # inputs that share a scale in most files of 4 bits
WORDS: Final = ("I32",)
SCALES: Final = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a coded weight. name: in its layer. other_name: what some files call it, "" for none. dtypes: that it may
    have.

    is_turned: the file has [inputs, outputs]. packed: the dimension of the weight, 0 for outputs or 1 for inputs, along which a
    32-bit word holds several codes, the first one in the lowest bits; None for a number each. order: of the codes in a word, if
    it is another.
    """

    name: str
    dtypes: tuple[str, ...]
    is_turned: bool = False
    packed: int | None = None
    order: tuple[int, ...] = ()
    other_name: str = ""

    def stored_shape(self, shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
        """In the file, of a tensor that has a number for each element of `shape`."""
        words = tuple(-(-size * bits // 32) if dim == self.packed else size for dim, size in enumerate(shape))
        return words[::-1] if self.is_turned else words


@dataclass(frozen=True, slots=True)
class Coding:
    """How the weights [outputs, inputs] of a linear layer are stored: (code - zero) * scale, as float32.

    bits: of a code, 8 of a float8_e4m3fn or int8. block: the outputs and inputs that share a scale and a zero, 0 for all.
    zeros: None if all are `zero`. word: added to each word of zeros. groups: the block of each input. is_scattered: a block's
    inputs need not be neighbours. shape: the weight's. is_symmetric: all zeros are the middle of the codes.
    """

    bits: int
    block: tuple[int, int]
    codes: Part
    scales: Part
    zeros: Part | None = None
    groups: Part | None = None
    shape: Part | None = None
    zero: int = 0
    word: int = 0
    is_symmetric: bool = True
    is_float: bool = False
    is_scattered: bool = False

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many blocks of outputs and of inputs a weight has."""
        return tuple(-(-size // block) if block else 1 for size, block in zip(shape, self.block, strict=True))

    def parts(self, shape: tuple[int, ...]) -> Iterator[tuple[Part, tuple[int, ...]]]:
        """The tensors of a weight with their shapes in the file."""
        blocks = self.blocks(shape)
        sizes = shape, blocks, blocks, shape[1:], (2,)
        for part, size in zip((self.codes, self.scales, self.zeros, self.groups, self.shape), sizes, strict=True):
            if part is not None:
                yield part, part.stored_shape(size, self.bits)

    def faults(self, layer: str, shape: tuple[int, ...], located: Mapping[str, Located]) -> list[str]:
        """What is wrong with the headers of a weight's tensors. layer: its name in the files."""
        faults = []
        for part, expected in self.parts(shape):
            name = f"{layer}.{part.name}"
            if name not in located:
                if part is not self.groups or self.is_scattered:
                    faults.append(f"{name} is missing")
            elif (found := located[name]).shape != expected and math.prod(found.shape) * math.prod(expected) != 1:
                faults.append(f"{name} has shape {shown(list(found.shape))}, expected {list(expected)}")
            elif found.dtype not in part.dtypes:
                faults.append(f"{name} has dtype {found.dtype}, expected {' or '.join(part.dtypes)}")
        return faults

    def stored_format(self, inputs: int) -> str:
        """What `weight_formats.held_as` calls a coding with the same values, if float16 holds the scales: a longer group is
        several of GROUP inputs with equal scales. A description for people if there is none."""
        width = self.block[1] or inputs
        is_grouped = width % GROUP == inputs % GROUP == 0 and not self.is_scattered
        if self.is_float or not is_grouped or (self.bits == 8 and not self.is_symmetric):
            return str(self)
        name = "int8_groups" if self.bits == 8 else "int4" if self.is_symmetric else "int4_zero"
        return name if self.bits == 8 or width % LONG_GROUP or inputs % LONG_GROUP else f"{name}_{LONG_GROUP}"

    def __str__(self) -> str:
        """Such as "float8 codes in blocks of 128 x 128"."""
        codes = "float8" if self.is_float else f"{self.bits}-bit"
        rows, columns = self.block
        blocks = {0: "with one scale", 1: "with a scale an output"}.get(rows, f"in blocks of {rows} x {columns}")
        if rows == 1 and columns:
            blocks = f"in {'scattered ' if self.is_scattered else ''}groups of {columns}"
        return f"{codes} codes{'' if self.is_symmetric else ' and zeros'} {blocks}"
