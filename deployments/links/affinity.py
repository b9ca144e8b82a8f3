"""Which prefixes of prompts each engine's cache holds, so that a front sends a prompt where most of it is computed already.

A wrong guess costs time, never a token.
"""

import time
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Final

from llama_core.scheduling.prefix_cache import PrefixHash, prefix_hash, root_hash
from llama_core.scheduling.request import Terms

HASH_BYTES: Final = 8  # of an engine's hashes: two equal ones cost a detour
KEY_BITS: Final = 60  # of these in an index: such an integer takes 32 bytes, a longer one 48
NUM_PARTS: Final = 256  # of a map
PART_SHIFT: Final = KEY_BITS - 8  # what is left of a key is the number of its part
CHUNK: Final = 32  # keys that are looked up together
EXPECTED_S: Final = 5.0  # a prompt that has been sent counts for so long, and at most twice as long


def shortened(prefix: PrefixHash) -> bytes:
    return prefix[:HASH_BYTES]


def _keys(hashes: Iterable[bytes]) -> Sequence[int]:
    """Of shortened hashes."""
    return [key & ((1 << KEY_BITS) - 1) for key in array("Q", b"".join(hashes))]


class PromptPrefixes:
    """The keys of one prompt's prefixes of one block, two blocks, ... as engines compute their hashes."""

    def __init__(self, terms: Terms, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self._root = root_hash(terms.cache_scope, terms.adapter)
        self._keys: dict[int, Sequence[int]] = {}

    def name(self, block_size: int, num_known: int) -> bytes:
        """A hash of the prompt up to its first block after `num_known`, or of all full ones; of all of a short prompt."""
        keys = self.keys(block_size)
        if not keys:
            return prefix_hash(self._root, self.prompt)
        return keys[min(num_known, len(keys) - 1)].to_bytes(HASH_BYTES, "big")

    def keys(self, block_size: int) -> Sequence[int]:
        if block_size not in self._keys:
            prefix, found = self._root, []
            for begin in range(0, len(self.prompt) - block_size + 1, block_size):
                prefix = prefix_hash(prefix, self.prompt[begin : begin + block_size])
                found.append(shortened(prefix))
            self._keys[block_size] = _keys(found)
        return self._keys[block_size]


class PrefixIndex:
    """Of a front's engines: what they tell of their caches, and the prompts that they have been sent lately.

    A map from key to bit mask of engines. It has parts, so that none takes long to grow, or to lose an engine that has gone:
    its bit is used again when all parts have been swept, of which each `learn` sweeps one.
    """

    def __init__(self) -> None:
        self._bits: dict[Hashable, int] = {}  # of engines
        self._engines: dict[int, Hashable] = {}  # by bit
        self._retired: dict[int, int] = {}  # by bit: how many parts may have it
        self._parts: list[dict[int, int]] = [{} for _ in range(NUM_PARTS)]
        self._swept = 0  # the part that was swept last
        self._expected: dict[int, int] = {}
        self._expected_before: dict[int, int] = {}
        self._since_s = time.monotonic()  # the beginning of `_expected`

    def num_known(self, keys: Sequence[int], *, has_window: bool = False) -> Mapping[Hashable, int]:
        """By engine, the blocks of a prompt that it need not compute; engines that know none are absent. has_window: engines
        read no block before a sliding window, and drop the first ones first."""
        known: dict[Hashable, int] = {}
        others = sum(self._engines)  # bits of engines that are not in `known`
        if has_window:
            for count, key in zip(range(len(keys), 0, -1), reversed(keys), strict=True):
                if found := self._engines_with(key) & others:
                    others ^= found
                    self._note(known, found, count)
                    if not others:
                        break
            return known
        for begin in range(0, len(keys), CHUNK):
            chunk, parts = keys[begin : begin + CHUNK], self._parts
            if reduce(and_, [parts[key >> PART_SHIFT].get(key, 0) for key in chunk], others) == others:
                continue  # every engine that is left has all of the chunk: the common case
            for count, key in enumerate(chunk, begin):
                if lost := others & ~self._engines_with(key):
                    others ^= lost
                    self._note(known, lost, count)
                    if not others:
                        return known
        self._note(known, others, len(keys))
        return known

    def _engines_with(self, key: int) -> int:
        expected = self._expected.get(key, 0) | self._expected_before.get(key, 0)
        return self._parts[key >> PART_SHIFT].get(key, 0) | expected

    def _note(self, known: dict[Hashable, int], bits: int, count: int) -> None:
        while count and bits:
            bit = bits & -bits
            known[self._engines[bit]] = count
            bits ^= bit

    def expect(self, engine: Hashable, keys: Iterable[int]) -> None:
        """The engine has been sent this prompt."""
        if (bit := self._bits.get(engine)) is not None:
            for key in keys:
                self._expected[key] = self._expected.get(key, 0) | bit

    def learn(self, engine: Hashable, cached: Iterable[bytes], evicted: Iterable[bytes], *, is_whole: bool) -> None:
        """What the engine tells in a `Beat`. An engine that has told something is to be forgotten when it has gone."""
        self._pass_time()
        if is_whole:
            self.forget(engine)
        if engine not in self._bits:
            used = sum(self._engines) + sum(self._retired)
            bit = self._bits[engine] = ~used & (used + 1)  # the lowest that is free
            self._engines[bit] = engine
        bit, parts = self._bits[engine], self._parts
        for key in _keys(cached):
            part = parts[key >> PART_SHIFT]
            mask = part.get(key)
            part[key] = bit if mask is None else mask | bit  # one integer for all keys of one engine alone
        for key in _keys(evicted):
            for expected in (self._expected, self._expected_before):
                if key in expected:
                    expected[key] &= ~bit
            part = parts[key >> PART_SHIFT]
            if left := part.get(key, 0) & ~bit:
                part[key] = left
            else:
                part.pop(key, None)

    def forget(self, engine: Hashable) -> None:
        if (bit := self._bits.pop(engine, None)) is not None:
            del self._engines[bit]
            self._retired[bit] = NUM_PARTS
            for expected in (self._expected, self._expected_before):
                expected.update([(key, mask ^ bit) for key, mask in expected.items() if mask & bit])

    def _pass_time(self) -> None:
        now_s = time.monotonic()
        if now_s - self._since_s > EXPECTED_S:
            self._expected, self._expected_before, self._since_s = {}, self._expected, now_s
        if retired := sum(self._retired):
            self._swept = (self._swept + 1) % NUM_PARTS
            items = self._parts[self._swept].items()
            left = {key: mask & ~retired if mask & retired else mask for key, mask in items if mask & ~retired}
            self._parts[self._swept] = left
            self._retired = {bit: num_parts - 1 for bit, num_parts in self._retired.items() if num_parts > 1}
