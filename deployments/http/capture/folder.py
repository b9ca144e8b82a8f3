"""The folder of captures: files that only the server's user can read, in a bounded total. Each belongs to an API key's owner.

Replicas of one machine share the folder.
"""

import asyncio
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Final

from deployments.http.errors import CaptureNotAllowed, CaptureNotFound
from llama_core.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX: Final = "capture-"
OWNER_DIGITS: Final = 12


class CaptureFolder:
    def __init__(self, path: Path, max_bytes: int) -> None:
        """Makes the folder if there is none. Raises ConfigError where that fails."""
        self._path, self._max_bytes = path, max_bytes
        self._writing: dict[Path, asyncio.Task[None]] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"capture_dir: the folder cannot be made: {error.strerror}") from None

    async def check_space(self) -> None:
        """Raises CaptureNotAllowed where the files have reached their limit."""
        if await asyncio.to_thread(self._num_bytes) >= self._max_bytes:
            raise CaptureNotAllowed(
                "X-Capture: the server's folder of captures is full: remove some from it, or raise capture_max_bytes",
                param="X-Capture",
            )

    def write(self, owner: str, request_id: str, content: bytes) -> None:
        """Store a capture in a thread; an earlier one of the same id and owner is replaced. A failure is logged."""
        file = self._file(owner, request_id)
        writing = asyncio.create_task(asyncio.to_thread(self._write, file, content))
        self._writing[file] = writing
        writing.add_done_callback(lambda _: self._writing.pop(file, None))

    async def read(self, owner: str, request_id: str) -> bytes:
        """The capture of a request by the same owner, once it is written. Raises CaptureNotFound."""
        file = self._file(owner, request_id)
        if (writing := self._writing.get(file)) is not None:
            await asyncio.wait((writing,))
        try:
            return await asyncio.to_thread(file.read_bytes)
        except OSError:
            raise CaptureNotFound(
                "There is no capture of a request with this id by this API key on this replica's machine."
            ) from None

    def _file(self, owner: str, request_id: str) -> Path:
        # The id is the client's, the digest keeps one client from the files of another.
        digest = hashlib.sha256(f"{owner}\n{request_id}".encode()).hexdigest()[:OWNER_DIGITS]
        return self._path / f"{PREFIX}{digest}-{request_id[-64:]}.json"

    def _num_bytes(self) -> int:
        with os.scandir(self._path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.startswith(PREFIX) and entry.is_file())

    def _write(self, file: Path, content: bytes) -> None:
        try:
            # mkstemp makes a file with mode 0600.
            descriptor, name = tempfile.mkstemp(prefix=".", dir=self._path)
            try:
                with os.fdopen(descriptor, "wb") as opened:
                    opened.write(content)
                os.replace(name, file)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            log.error("a capture could not be written to %s: %s", self._path, error.strerror)
