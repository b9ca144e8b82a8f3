"""Allocates the KV cache's blocks. Keeps the free ones, and the number of sequences that hold each of the others.

Free blocks that hold no registered prefix are reused first, then the ones released longest ago. Knows nothing of sequences.
Every operation is O(blocks moved).
"""

from collections import OrderedDict
from collections.abc import Reversible
from collections.abc import Sequence as Seq

from llama_core.scheduling.prefix_cache import BlockId, PrefixIndex


class BlockPool:
    """A fixed number of equal blocks. `prefixes`: which of them, held or free, hold a prefix that may be shared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefixes = PrefixIndex(num_blocks)
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(num_blocks))  # first to be reused first
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def try_allocate(self, num_blocks: int, *, shared: Seq[BlockId] = (), reserve: int = 0) -> list[BlockId] | None:
        """`num_blocks` blocks to write to, and a share in each of `shared`, as long as `reserve` blocks stay free.

        None, and nothing allocated, when fewer are free.
        """
        free, num_holders = self._free, self._num_holders
        num_revived = sum(not num_holders[block] for block in shared)
        if num_blocks + num_revived + reserve > len(free):
            return None
        for block in shared:
            if not num_holders[block]:
                del free[block]
            num_holders[block] += 1
        blocks = [free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            assert not num_holders[block]
            num_holders[block] = 1
        self.prefixes.evict(blocks)
        return blocks

    def release(self, blocks: Reversible[BlockId]) -> None:
        """Give up one share in each of a sequence's `blocks`. Of the blocks that are free now, the sequence's last are reused
        first: a prefix is looked up more often than its continuation, which is useless without it."""
        for block in reversed(blocks):
            assert self._num_holders[block], f"block {block} was released too often"
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free[block] = None
                if block not in self.prefixes:
                    self._free.move_to_end(block, last=False)
