"""Which blocks of a sequence ranks still read, for models in which every layer attends to the latest positions only. Pure.

The position p of a layer with window w attends to p - w + 1 .. p + 1 (half-open). Blocks wholly outside the longest window of
the next position to compute are never read again: the scheduler frees them, and a sequence of any length holds few blocks.
"""

from dataclasses import dataclass
from typing import Final

from llama_core.model.operations import FULL_ATTENTION

MAX_CHUNK: Final = 512  # prompt tokens of one row: a sequence holds blocks for its window and one chunk


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """size: positions that the widest layer attends to, its own included; FULL_ATTENTION for all. block_size: positions of a
    block. max_chunk: positions that one row computes at most."""

    size: int
    block_size: int
    max_chunk: int

    @classmethod
    def of(cls, size: int, block_size: int, max_step_tokens: int) -> "SlidingWindow":
        return cls(size, block_size, min(MAX_CHUNK, max_step_tokens))

    def num_behind(self, start: int) -> int:
        """Leading blocks of a sequence that no row from position `start` on reads."""
        return max(0, start + 1 - self.size) // self.block_size if self.size != FULL_ATTENTION else 0

    def num_held(self, length: int) -> int:
        """Blocks that a sequence of `length` positions holds at most, while it runs."""
        num_blocks = -(-length // self.block_size)
        if self.size == FULL_ATTENTION:
            return num_blocks
        # One block more, because window and chunk need not begin with a block.
        return min(num_blocks, -(-(self.size - 1 + self.max_chunk) // self.block_size) + 1)

    def row_end(self, start: int, length: int) -> int:
        """The end of the longest row from `start` in a sequence of `length` known tokens."""
        return length if self.size == FULL_ATTENTION else min(length, start + self.max_chunk)
