"""Accounts for the cache's blocks: who holds them, which are free, and which still have keys and values of known tokens.

A block is held by one sequence or by several, or it is free. A block that is full may be given a key, which stands for
its tokens and all before them; by that key it is found, held or free, until it is reused. Free blocks without a key are
reused first, then those that were given back longest ago. Knows nothing of sequences. Every operation is O(blocks moved).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Reversible
from collections.abc import Sequence as Seq
from hashlib import blake2b

BlockId = int
BlockKey = bytes


def root_key(cache_scope: str) -> BlockKey:
    """The parent of a sequence's first block: a hash of the scope, so that no key of one scope is one of another."""
    return blake2b(cache_scope.encode("utf-8", "surrogatepass"), digest_size=32).digest() if cache_scope else b""


def block_key(parent: BlockKey, tokens: Seq[int]) -> BlockKey:
    """The key of a block of `tokens` behind the one whose key is `parent`, `root_key` for a sequence's first.

    256 bits of BLAKE2b: nobody can make two beginnings that share a key, so a key found is the text meant.
    """
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=32).digest()


class BlockPool:
    """A fixed number of equal blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(num_blocks))  # first to be reused first
        self._num_holders = [0] * num_blocks
        self._block_of: dict[BlockKey, BlockId] = {}
        self._key_of: list[BlockKey | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The blocks of the longest beginning of `keys` that is here. Takes nothing: hand them to `try_allocate`."""
        blocks: list[BlockId] = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def try_allocate(self, num_blocks: int, *, shared: Seq[BlockId] = (), reserve: int = 0) -> list[BlockId] | None:
        """`num_blocks` blocks to write to, and a share in each of `shared`, as long as `reserve` blocks stay free.

        None, and nothing taken, when fewer are free.
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
            if (key := self._key_of[block]) is not None:
                del self._block_of[key]
                self._key_of[block] = None
        return blocks

    def release(self, blocks: Reversible[BlockId]) -> None:
        """Give up one share in each of a sequence's `blocks`. Of those free now, the sequence's last are reused first: a
        beginning is asked for more often, and what follows is of no use without it."""
        for block in reversed(blocks):
            assert self._num_holders[block], f"block {block} was released too often"
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def name(self, block: BlockId, key: BlockKey) -> None:
        """From now on `block`, which is held and full, is found by `key`, unless another already is."""
        assert self._num_holders[block] and self._key_of[block] is None
        if self._block_of.setdefault(key, block) == block:
            self._key_of[block] = key

    def forget(self, blocks: Iterable[BlockId] | None = None) -> None:
        """Find these blocks, or all, by their keys no more."""
        for block in range(self.num_blocks) if blocks is None else blocks:
            if (key := self._key_of[block]) is not None:
                del self._block_of[key]
                self._key_of[block] = None
