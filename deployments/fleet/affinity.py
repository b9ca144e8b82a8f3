"""Which prefixes of prompts an engine's cache holds: those that the engine tells, and those of prompts that are on their way.

A wrong guess costs time, never a token.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from llama_core.scheduling.prefix_cache import PrefixHash, prefix_hash, root_hash

KEY_BYTES: Final = 8  # of a hash: a collision costs a detour
MAX_PREFIXES: Final = 2**16  # of one engine: those of a million tokens


class KnownPrefixes:
    """Of one engine, the least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Blocks of a prompt that the engine has computed. keys: of `prefixes`."""
        unknown = (index for index, key in enumerate(keys) if key not in self._keys)
        return next(unknown, len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the beginning of a prompt is dropped last
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_PREFIXES:
            self._keys.popitem(last=False)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


def key_of(prefix: PrefixHash) -> bytes:
    return prefix[:KEY_BYTES]


def prefixes(cache_scope: str, adapter: str, prompt: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of the prompt's prefixes of one block, two blocks, ... as engines compute them."""
    prefix, keys = root_hash(cache_scope, adapter), []
    for begin in range(0, len(prompt) - block_size + 1, block_size):
        prefix = prefix_hash(prefix, prompt[begin : begin + block_size])
        keys.append(key_of(prefix))
    return keys
