"""The API keys of a server: from the environment, and from a file that is read again when it changes.

LLAMA_API_KEYS, read where the application is built, holds keys separated by commas. The key file holds one key a line; empty
lines and lines that begin with # are skipped. Only the SHA-256 of a key is kept and passed on. A key is compared with every
digest in constant time, so the time of an answer says nothing about a guess.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from llama_core.errors import ConfigError
from llama_core.files.text_files import as_utf8

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0  # of whether the key file has changed


class ApiKeys:
    """The configured keys. Without any, `are_required` is False."""

    def __init__(self, digests: Iterable[str] = (), file: Path | None = None) -> None:
        """`digests`: the result of `digests_of`. Raises ConfigError if the file cannot be read or has no key in it."""
        self._fixed = frozenset(bytes.fromhex(digest) for digest in digests)
        self._file = file
        self._from_file: frozenset[bytes] = frozenset()
        self._stamp: tuple[int, int, int] | None = None
        self._checked_s = -CHECK_INTERVAL_S
        if file is not None:
            try:
                self._read(file)
            except OSError as error:
                raise ConfigError.of("api_key_file", f"{file}: {error.strerror}") from None
            if not self._from_file:
                raise ConfigError.of("api_key_file", f"{file} has no key in it")

    @property
    def are_required(self) -> bool:
        return bool(self._fixed or self._file)

    @property
    def are_several(self) -> bool:
        """As of the latest `owner_of`."""
        return len(self._fixed | self._from_file) > 1

    def owner_of(self, key: bytes) -> str | None:
        """A short name of this key's owner that does not reveal the key; None if the key is not configured."""
        self._refresh()
        digest, known = _digest(key), False
        for other in self._fixed | self._from_file:
            known |= hmac.compare_digest(digest, other)
        return digest.hex()[:12] if known else None

    def _refresh(self) -> None:
        """Reads the file if it has changed. If it has no key or cannot be read, the keys stay: it may be half written."""
        if self._file is None or time.monotonic() - self._checked_s < CHECK_INTERVAL_S:
            return
        try:
            self._read(self._file)
        except OSError as error:
            log.warning("the API key file cannot be read (%s); the previous keys stay valid", error.strerror)

    def _read(self, file: Path) -> None:
        self._checked_s = time.monotonic()
        status = file.stat()
        stamp = (status.st_ctime_ns, status.st_size, status.st_ino)  # no process can set the ctime
        if stamp == self._stamp:
            return
        lines = (line.strip() for line in as_utf8(file.read_bytes()).splitlines())
        keys = frozenset(_digest(line) for line in lines if line and not line.startswith(b"#"))
        is_first, self._stamp = self._stamp is None, stamp
        if not keys:
            log.warning("the API key file has no key in it; the previous keys stay valid")
            return
        if not is_first:
            log.info("the API key file has changed: %d keys", len(keys))
        self._from_file = keys


def digests_of(keys: str) -> tuple[str, ...]:
    """The SHA-256 of each of the comma-separated keys, in hexadecimal."""
    return tuple(_digest(key.strip().encode()).hex() for key in keys.split(",") if key.strip())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
