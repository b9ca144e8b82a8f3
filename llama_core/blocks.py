"""Accounts for the cache's blocks. Knows which are free, not what is in them."""

from collections.abc import Iterable

BlockId = int


class BlockPool:
    """A fixed number of equal blocks, each either free or owned once. Every operation is O(blocks moved)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last freed, first reused: its memory is the likeliest to be in a cache still.
        self._free: list[BlockId] = list(range(num_blocks - 1, -1, -1))
        self._owned = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def try_allocate(self, num_blocks: int) -> list[BlockId] | None:
        """`num_blocks` blocks, or None (and nothing taken) when fewer are free."""
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        for block in blocks:
            assert not self._owned[block]
            self._owned[block] = 1
        return blocks

    def release(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            assert self._owned[block], f"block {block} was released twice"
            self._owned[block] = 0
            self._free.append(block)
