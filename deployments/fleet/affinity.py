"""Which prefixes of prompts an engine's cache holds, so that a front sends a prompt where most of it is computed already.

A wrong guess costs time, never a token.
"""

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from llama_core.scheduling.prefix_cache import PrefixHash, prefix_hash, root_hash

HASH_BYTES: Final = 8  # of an engine's hashes: two equal ones cost a detour
EXPECTED_S: Final = 5.0  # a prompt that has been sent counts for so long, and at most twice as long


def shortened(prefix: PrefixHash) -> bytes:
    return prefix[:HASH_BYTES]


class PromptPrefixes:
    """The shortened hashes of one prompt's prefixes of one block, two blocks, ... as engines compute them."""

    def __init__(self, cache_scope: str, adapter: str, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self._root = root_hash(cache_scope, adapter)
        self._hashes: dict[int, list[bytes]] = {}

    @cached_property
    def name(self) -> bytes:
        """A hash of the whole prompt."""
        return shortened(prefix_hash(self._root, self.prompt))

    def hashes(self, block_size: int) -> list[bytes]:
        if block_size not in self._hashes:
            prefix, found = self._root, []
            for begin in range(0, len(self.prompt) - block_size + 1, block_size):
                prefix = prefix_hash(prefix, self.prompt[begin : begin + block_size])
                found.append(shortened(prefix))
            self._hashes[block_size] = found
        return self._hashes[block_size]


class KnownPrefixes:
    """Of one engine: what it tells of its cache, and the prompts that it has been sent lately."""

    def __init__(self) -> None:
        self._cached: set[bytes] = set()
        self._expected: set[bytes] = set()
        self._expected_before: set[bytes] = set()
        self._since_s = time.monotonic()  # the beginning of `_expected`

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Blocks of a prompt that the engine need not compute. An engine with a sliding window drops the first ones first."""
        for index in range(len(hashes), 0, -1):
            if any(hashes[index - 1] in known for known in (self._cached, self._expected, self._expected_before)):
                return index
        return 0

    def expect(self, hashes: Iterable[bytes]) -> None:
        """The engine has been sent this prompt."""
        self._expected.update(hashes)

    def learn(self, cached: Iterable[bytes], evicted: Iterable[bytes], *, is_whole: bool) -> None:
        """What the engine tells in a `Beat`."""
        if is_whole:
            self._cached.clear()
        self._cached.update(cached)
        self._cached.difference_update(evicted)
        now_s = time.monotonic()
        if now_s - self._since_s > EXPECTED_S:
            self._expected, self._expected_before, self._since_s = set(), self._expected, now_s
