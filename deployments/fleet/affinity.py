"""Which prefixes of prompts an engine has computed, as far as one front knows: those of the prompts that it has sent there.

The engine may have dropped them, and may have those of other fronts: a wrong guess costs time, never a token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

CHUNK: Final = 64  # tokens: a prefix is known in multiples of them
MAX_PREFIXES: Final = 2**14  # of one engine: those of a million tokens


class KnownPrefixes:
    """Of one engine, the least recently used first."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Tokens of a prompt that the engine has computed. digests: of `prefixes`."""
        unknown = (index for index, digest in enumerate(digests) if digest not in self._digests)
        return CHUNK * next(unknown, len(digests))

    def add(self, digests: Sequence[bytes]) -> None:
        """The engine computes this prompt."""
        for digest in reversed(digests):  # the beginning of a prompt is dropped last
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > MAX_PREFIXES:
            self._digests.popitem(last=False)


def prefixes(cache_scope: str, prompt: Sequence[int]) -> list[bytes]:
    """A digest of each prefix of 64, 128, ... tokens. Only requests of one `cache_scope` share prefixes."""

    def each() -> Iterator[bytes]:
        digest = blake2b(cache_scope.encode(), digest_size=16)
        for begin in range(0, len(prompt) - CHUNK + 1, CHUNK):
            digest.update(array("q", prompt[begin : begin + CHUNK]).tobytes())
            yield digest.digest()

    return list(each())
