"""SHA-256 digests of a checkpoint's files, and one digest of the whole checkpoint, and the identity of unchanged files, which
needs no reading. Knows nothing of weights or ranks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llama_core.errors import CheckpointError
from llama_core.host.memory import host_identity


@dataclass(frozen=True, slots=True)
class CheckpointDigest:
    """The contents of a checkpoint's files: (name in the directory, SHA-256 in lower-case hex) of each, in a fixed order.

    Two checkpoints with equal digests hold the same bytes under the same names. Plain: crosses processes.
    """

    files: tuple[tuple[str, str], ...]

    @property
    def value(self) -> str:
        """One SHA-256 for all files: that of the lines which `sha256sum` prints for them in this order."""
        lines = "".join(f"{sha256}  {name}\n" for name, sha256 in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()

    def first_difference(self, other: "CheckpointDigest") -> tuple[str, str, str]:
        """(file name, its SHA-256 here, its SHA-256 in `other`) of the first file that differs; "absent" for a missing file."""
        assert self != other
        own, others = dict(self.files), dict(other.files)
        name = next(name for name in [*own, *others] if own.get(name) != others.get(name))
        return name, own.get(name, "absent"), others.get(name, "absent")


def sha256_of(file: Path) -> str:
    """SHA-256 of the file's bytes, in lower-case hex. Raises CheckpointError that names the file."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


def sha256_of_each(files: Sequence[Path], num_threads: int) -> Iterator[str]:
    """`sha256_of` each file in order, `num_threads` files at a time. hashlib releases the interpreter's lock."""
    with ThreadPoolExecutor(max(1, min(num_threads, len(files)))) as threads:
        yield from threads.map(sha256_of, files)


def identity(files: Sequence[Path]) -> int:
    """A number below 2**63 that changes when a file changes. Processes share it only if they see the very same files on one
    host. Reads no file: the kernel records the time of each change of a file, and no process can set that time.
    """
    seen = [str(host_identity())]
    for file in files:
        try:
            status = file.stat()
        except OSError:
            seen.append("absent")
        else:
            seen.append(f"{file.name} {status.st_dev} {status.st_ino} {status.st_size} {status.st_ctime_ns}")
    return int.from_bytes(hashlib.sha256("\n".join(seen).encode()).digest()[:8]) >> 1
