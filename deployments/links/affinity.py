"""Which prefixes of prompts each engine's cache holds, so that a front sends a prompt where most of it is computed already.

A wrong guess costs time, never a token.
"""

import time
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import and_, or_
from typing import Final

from llama_core.scheduling.prefix_cache import PrefixHash, prefix_hash, root_hash
from llama_core.scheduling.request import Terms

HASH_BYTES: Final = 8  # of an engine's hashes: two equal ones cost a detour
KEY_BITS: Final = 60  # of these in an index: such an integer takes 32 bytes, a longer one 48
CHUNK: Final = 64  # keys that are looked up together
SWEPT: Final = 2048  # keys that each `learn` rids of engines that have gone
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

    Maps from key to bit mask of engines. The bit of an engine that has gone is used again when no mask has it any more.
    """

    def __init__(self) -> None:
        self._bits: dict[Hashable, int] = {}  # of engines
        self._engines: dict[int, Hashable] = {}  # by bit
        self._masks: dict[int, int] = {}
        self._retired = 0  # bits that are swept from masks
        self._retired_next = 0  # bits that will be swept then
        self._to_sweep: list[int] = []  # keys
        self._expected: dict[int, int] = {}
        self._expected_before: dict[int, int] = {}
        self._since_s = time.monotonic()  # the beginning of `_expected`

    def num_known(self, keys: Sequence[int], *, has_window: bool = False) -> Mapping[Hashable, int]:
        """By engine, the blocks of a prompt that it need not compute; engines that know none are absent. has_window: engines
        read no block before a sliding window, and drop the first ones first."""
        known: dict[Hashable, int] = {}
        others = sum(self._engines)  # bits of engines that are not in `known`
        if has_window:
            for count, mask in zip(range(len(keys), 0, -1), self._engines_with(keys[::-1]), strict=True):
                if found := mask & others:
                    others ^= found
                    self._note(known, found, count)
                    if not others:
                        break
            return known
        for begin in range(0, len(keys), CHUNK):
            chunk = keys[begin : begin + CHUNK]
            told = {*map(self._masks.get, chunk)}  # few, where engines know the prompt
            if None not in told and reduce(and_, told, others) == others:
                continue  # every engine that is left has all of the chunk: the common case
            for count, mask in enumerate(self._engines_with(chunk), begin):
                if lost := others & ~mask:
                    others ^= lost
                    self._note(known, lost, count)
                    if not others:
                        return known
        self._note(known, others, len(keys))
        return known

    def _engines_with(self, keys: Sequence[int]) -> Iterator[int]:
        expected = map(or_, map(self._expected.get, keys, repeat(0)), map(self._expected_before.get, keys, repeat(0)))
        return map(or_, map(self._masks.get, keys, repeat(0)), expected)

    def _note(self, known: dict[Hashable, int], bits: int, count: int) -> None:
        if count and bits:
            known |= {engine: count for bit, engine in self._engines.items() if bit & bits}

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
            used = sum(self._engines) | self._retired | self._retired_next
            bit = self._bits[engine] = ~used & (used + 1)  # the lowest that is free
            self._engines[bit] = engine
        bit, masks = self._bits[engine], self._masks
        for key in _keys(cached):
            mask = masks.get(key)
            masks[key] = bit if mask is None else mask | bit  # one integer for all keys of one engine alone
        gone = _keys(evicted)
        self._clear(gone, bit)
        for expected in (self._expected, self._expected_before):
            for key in gone:
                if key in expected:
                    expected[key] &= ~bit

    def _clear(self, keys: Iterable[int], bits: int) -> None:
        masks = self._masks
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bits:
                if left := mask & ~bits:
                    masks[key] = left
                else:
                    del masks[key]

    def forget(self, engine: Hashable) -> None:
        if (bit := self._bits.pop(engine, None)) is not None:
            del self._engines[bit]
            self._retired_next |= bit
            for expected in (self._expected, self._expected_before):
                expected.update([(key, mask ^ bit) for key, mask in expected.items() if mask & bit])

    def _pass_time(self) -> None:
        now_s = time.monotonic()
        if now_s - self._since_s > EXPECTED_S:
            self._expected, self._expected_before, self._since_s = {}, self._expected, now_s
        self._clear(self._to_sweep[-SWEPT:], self._retired)
        del self._to_sweep[-SWEPT:]
        if not self._to_sweep:
            self._retired, self._retired_next = self._retired_next, 0
            if self._retired:
                self._to_sweep = [*self._masks]
