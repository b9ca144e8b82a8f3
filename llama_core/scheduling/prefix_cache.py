"""Finds the cache blocks that hold the keys and values of a prefix, by a hash of the prefix's tokens.

A full block is registered under a hash of its tokens and of all tokens before it in the sequence. A block can be looked up from
then on, whether a sequence holds it or it is free, until it is evicted: reused for other tokens.
"""

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Final

from llama_core.model.operations import FULL_ATTENTION
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sliding_window import SlidingWindow

BlockId = int
UNREAD: Final[BlockId] = 0  # fills a block table where no row reads: outside the sliding window
PrefixHash = bytes


def prefix_hash(parent: PrefixHash, tokens: Seq[int]) -> PrefixHash:
    """The hash of a block of `tokens` after the block whose hash is `parent`; `root_hash` for a sequence's first block.

    256 bits of BLAKE2b: no two prefixes with the same hash can be made, so a found block holds exactly that prefix.
    """
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=32).digest()


def root_hash(cache_scope: str, adapter: str = "") -> PrefixHash:
    """The parent of a sequence's first block: a hash of the scope and of the adapter's digest, so that no prefix of one scope
    or adapter is found from another."""
    scope = f"{adapter}:{cache_scope}" if adapter else cache_scope
    return blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=32).digest() if scope else b""


class PrefixIndex:
    """Which block is registered under which hash: at most one block a hash and one hash a block. Knows nothing of sequences."""

    def __init__(self, num_blocks: int) -> None:
        self._changes: dict[PrefixHash, bool] | None = None
        self._block_of: dict[PrefixHash, BlockId] = {}
        self._hash_of: list[PrefixHash | None] = [None] * num_blocks

    def __contains__(self, block: BlockId) -> bool:
        return self._hash_of[block] is not None

    @property
    def hashes(self) -> Iterable[PrefixHash]:
        return self._block_of.keys()

    def take_changes(self) -> dict[PrefixHash, bool] | None:
        """The hashes that have been registered or evicted since the last call, and whether each is registered now. None at
        first and after `clear`: all `hashes` may be new."""
        changes, self._changes = self._changes, {}
        return changes

    def lookup(self, hashes: Iterable[PrefixHash]) -> list[BlockId]:
        """The blocks of the longest registered prefix of `hashes`. Allocates nothing: pass them to `try_allocate`."""
        blocks: list[BlockId] = []
        for prefix in hashes:
            if (block := self._block_of.get(prefix)) is None:
                break
            blocks.append(block)
        return blocks

    def lookup_behind(self, hashes: Seq[PrefixHash], window: SlidingWindow) -> list[BlockId]:
        """`lookup` where rows read only the blocks in `window`: the longest prefix whose last blocks are registered. Earlier
        blocks are UNREAD."""
        num_found = longest = 0  # registered blocks in a row, up to here
        for i, prefix in enumerate(hashes, 1):
            num_found = num_found + 1 if prefix in self._block_of else 0
            if num_found >= i - window.num_behind(i * window.block_size):
                longest = i
        num_unread = window.num_behind(longest * window.block_size)
        return [UNREAD] * num_unread + [self._block_of[prefix] for prefix in hashes[num_unread:longest]]

    def register(self, block: BlockId, prefix: PrefixHash) -> None:
        """Register the full, held `block` under `prefix`, unless another block is registered there."""
        assert self._hash_of[block] is None
        if self._block_of.setdefault(prefix, block) == block:
            self._hash_of[block] = prefix
            if self._changes is not None:
                self._changes[prefix] = True

    def evict(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if (prefix := self._hash_of[block]) is not None:
                del self._block_of[prefix]
                self._hash_of[block] = None
                if self._changes is not None:
                    self._changes[prefix] = False

    def evict_prefixes(self, hashes: Iterable[PrefixHash]) -> None:
        self.evict([block for prefix in hashes if (block := self._block_of.get(prefix)) is not None])

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)
        self._changes = None


class PrefixCache:
    """Looks up and registers the blocks of sequences. Does neither where `is_enabled` is False."""

    def __init__(self, index: PrefixIndex, window: SlidingWindow, *, is_enabled: bool) -> None:
        self._index = index
        self._window = window
        self._block_size = window.block_size
        self._is_enabled = is_enabled

    def lookup(self, seq: Sequence) -> list[BlockId]:
        """Blocks that hold the sequence's prefix, UNREAD in place of those outside the sliding window. At least one token is
        left over: sampling needs a computed position."""
        # Logprobs and embeddings of a prompt come from computing it.
        if not self._is_enabled or seq.reads_whole_prompt:
            return []
        hashes = self._hashes(seq, 0, (seq.length - 1) // self._block_size)
        if self._window.size == FULL_ATTENTION:
            return self._index.lookup(hashes)
        return self._index.lookup_behind(list(hashes), self._window)

    def is_coming(self, seq: Sequence, num_found: int, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence is about to compute the block of `seq` after the `num_found` ones that `lookup` finds."""
        end = (num_found + 1) * self._block_size
        if not self._is_enabled or seq.reads_whole_prompt or end >= seq.length:
            return False
        root = seq.terms.cache_scope, seq.terms.adapter
        return any(
            other.scheduled < end <= other.length
            and (other.terms.cache_scope, other.terms.adapter) == root
            and other.tokens[:end] == seq.tokens[:end]
            for other in running
        )

    def evict(self, seq: Sequence) -> None:
        """No later sequence finds what this one has computed, also in blocks that it has released."""
        self._index.evict_prefixes(seq.block_hashes)

    def register(self, seq: Sequence) -> None:
        """Register the sequence's full blocks: all their tokens are known and computed by a step that has been made. Drafts are
        neither."""
        num_full = min(seq.scheduled, seq.length) // self._block_size
        if self._is_enabled and num_full > seq.num_registered:
            for i, prefix in enumerate(self._hashes(seq, seq.num_registered, num_full), seq.num_registered):
                self._index.register(seq.blocks[i], prefix)
            seq.num_registered = num_full

    def _hashes(self, seq: Sequence, begin: int, end: int) -> Iterator[PrefixHash]:
        """Hashes of the sequence's blocks begin .. end, computed on demand and kept in the sequence."""
        hashes, size = seq.block_hashes, self._block_size
        for i in range(begin, end):
            if i == len(hashes):
                parent = hashes[-1] if hashes else root_hash(seq.terms.cache_scope, seq.terms.adapter)
                hashes.append(prefix_hash(parent, seq.tokens[i * size : (i + 1) * size]))
            yield hashes[i]
