"""The block pool: free, shared and registered blocks, and the order of their reuse."""

import pytest

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prefix_cache import prefix_hash


def named(pool: BlockPool, num_blocks: int, text: str) -> tuple[list[int], list[bytes]]:
    """Allocated and registered blocks, and their prefix hashes."""
    blocks = pool.try_allocate(num_blocks)
    assert blocks is not None
    keys = [f"{text}{i}".encode() for i in range(num_blocks)]
    for block, key in zip(blocks, keys, strict=True):
        pool.prefixes.register(block, key)
    return blocks, keys


def test_a_prefix_hash_depends_on_the_block_and_all_tokens_before_it() -> None:
    first, other = prefix_hash(b"", [1, 2]), prefix_hash(b"", [2, 1])
    assert len({first, other, prefix_hash(first, [1, 2]), prefix_hash(other, [1, 2]), prefix_hash(b"", [1])}) == 5
    assert prefix_hash(first, [7, 8]) == prefix_hash(prefix_hash(b"", [1, 2]), [7, 8])


def test_unregistered_blocks_are_reused_first_and_then_the_ones_released_longest_ago() -> None:
    pool = BlockPool(6, 4)
    old, old_keys = named(pool, 2, "old")
    new, new_keys = named(pool, 2, "new")
    (plain,) = pool.try_allocate(1) or []
    pool.release(old)
    pool.release(new)
    pool.release([plain])
    assert pool.try_allocate(2) == [plain, 5]
    assert pool.prefixes.lookup(old_keys) == old and pool.prefixes.lookup(new_keys) == new
    assert pool.try_allocate(1) == [old[1]], "the last block of a sequence before its first"
    assert pool.prefixes.lookup(old_keys) == old[:1]
    assert pool.try_allocate(2) == [old[0], new[1]]
    assert pool.prefixes.lookup(old_keys) == [] and pool.prefixes.lookup(new_keys) == new[:1]


def test_a_block_is_free_when_its_last_holder_has_released_it() -> None:
    pool = BlockPool(4, 4)
    blocks, keys = named(pool, 2, "shared")
    assert pool.try_allocate(1, shared=blocks) is not None
    assert pool.num_used == 3
    pool.release(blocks)
    assert pool.num_used == 3
    pool.release(blocks)
    assert pool.num_used == 1 and pool.prefixes.lookup(keys) == blocks
    with pytest.raises(AssertionError, match="too often"):
        pool.release(blocks)


def test_a_shared_free_block_is_not_allocated_to_be_written() -> None:
    pool = BlockPool(4, 4)
    blocks, _ = named(pool, 3, "found")
    pool.release(blocks)
    assert pool.try_allocate(2, shared=blocks) is None, "three of the four free blocks will be shared"
    assert pool.num_free == 4
    fresh = pool.try_allocate(1, shared=blocks)
    assert fresh is not None and not set(fresh) & set(blocks)
    assert pool.num_free == 0


def test_the_reserve_stays_free() -> None:
    pool = BlockPool(4, 4)
    assert pool.try_allocate(2, reserve=3) is None and pool.num_free == 4
    assert pool.try_allocate(2, reserve=2) is not None


def test_a_prefix_that_two_sequences_computed_is_registered_once() -> None:
    pool = BlockPool(4, 4)
    (first,), (key,) = named(pool, 1, "same")
    (second,) = pool.try_allocate(1) or []
    pool.prefixes.register(second, key)
    assert pool.prefixes.lookup([key]) == [first]
    pool.release([second])
    assert pool.prefixes.lookup([key]) == [first], "releasing the unregistered copy keeps the prefix registered"


def test_an_evicted_prefix_is_not_found_even_while_its_block_is_held() -> None:
    pool = BlockPool(6, 4)
    held, held_keys = named(pool, 2, "held")
    free, free_keys = named(pool, 2, "free")
    pool.release(free)
    pool.prefixes.evict(held[:1])
    assert (
        pool.prefixes.lookup(held_keys) == []
        and pool.prefixes.lookup(held_keys[1:]) == held[1:]
        and pool.prefixes.lookup(free_keys) == free
    )
    pool.prefixes.clear()
    assert pool.prefixes.lookup(held_keys[1:]) == [] and pool.prefixes.lookup(free_keys) == []
    assert pool.num_used == 2
