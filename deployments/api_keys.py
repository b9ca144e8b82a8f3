"""Who may ask: keys from the environment and from a file that is read again when it changes.

LLAMA_API_KEYS, where the application is built, has keys separated by commas, the file one a line; empty lines and those that
begin with # are passed over. Of a key only its SHA-256 is kept and passed on. Digests are compared in constant time, all of
them, so that the time of an answer says nothing of how near a guess came.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from llama_core.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # whether the file has changed


class ApiKeys:
    """`owner_of` a key. Without any key configured, everybody may ask."""

    def __init__(self, digests: Iterable[str] = (), file: Path | None = None) -> None:
        """`digests`: as `digests_of` gives them. Raises ConfigError if the file cannot be read or has no key in it."""
        self._fixed = frozenset(bytes.fromhex(digest) for digest in digests)
        self._file = file
        self._from_file: frozenset[bytes] = frozenset()
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = -LOOK_EVERY_S
        if file is not None:
            try:
                self._read(file)
            except OSError as error:
                raise ConfigError(f"api_key_file: {file}: {error.strerror}", param="api_key_file") from None
            if not self._from_file:
                raise ConfigError(f"api_key_file: {file} has no key in it", param="api_key_file")

    @property
    def are_required(self) -> bool:
        return bool(self._fixed or self._file)

    def owner_of(self, key: bytes) -> str | None:
        """A short name for who has this key, which does not tell it; None if nobody has."""
        self._refresh()
        digest, known = _digest(key), False
        for other in self._fixed | self._from_file:
            known |= hmac.compare_digest(digest, other)
        return digest.hex()[:12] if known else None

    def _refresh(self) -> None:
        """A file that cannot be read, or has no key, changes nothing: whoever writes it may not be done yet."""
        if self._file is None or time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        try:
            self._read(self._file)
        except OSError as error:
            log.warning("the file of API keys cannot be read, the keys stay as they were: %s", error.strerror)

    def _read(self, file: Path) -> None:
        self._looked_s = time.monotonic()
        status = file.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return
        lines = (line.strip() for line in file.read_bytes().splitlines())
        keys = frozenset(_digest(line) for line in lines if line and not line.startswith(b"#"))
        is_first, self._stamp = self._stamp is None, stamp
        if not keys:
            log.warning("the file of API keys has no key in it, the keys stay as they were")
            return
        if not is_first:
            log.info("the file of API keys has changed: %d keys", len(keys))
        self._from_file = keys


def digests_of(keys: str) -> tuple[str, ...]:
    """In hexadecimal, of keys separated by commas."""
    return tuple(_digest(key.strip().encode()).hex() for key in keys.split(",") if key.strip())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
