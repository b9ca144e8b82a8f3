"""SHA256SUMS: which contents a checkpoint's files must have, and whether they have them. Knows nothing of what is in them.

The file is what `sha256sum` writes and `sha256sum -c` reads. It is read once, where the model is started; what it says goes
to the ranks with their configuration, so that nothing on another node can speak for itself.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llama_core.checkpoint.digest import sha256_of_each
from llama_core.checkpoint.files import files_of
from llama_core.errors import CheckpointError

FILE_NAME = "SHA256SUMS"
_MAX_BYTES = 16 * 2**20  # a shard named by mistake is gigabytes
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_OURS = re.compile(r"params\.json|consolidated\..*\.pth")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """path: of the file that said so. digests: SHA-256 in lower case, by absolute path. Plain: it crosses processes."""

    path: str
    digests: Mapping[str, str] = field(repr=False)

    @classmethod
    def find(cls, ckpt_dir: str | Path, path: str | Path | None = None) -> "Manifest | None":
        """The manifest at `path`, which must be there then; without one SHA256SUMS in `ckpt_dir`, or None."""
        if path is None and not (Path(ckpt_dir) / FILE_NAME).exists():
            return None
        return cls.read(Path(ckpt_dir) / FILE_NAME if path is None else Path(path), ckpt_dir)

    @classmethod
    def read(cls, path: Path, ckpt_dir: str | Path) -> "Manifest":
        """A relative name in it counts from its own directory, as for `sha256sum -c` there, or from `ckpt_dir`.

        Raises CheckpointError that names the file, and the line at fault.
        """
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{path}: has more than {_MAX_BYTES} bytes", param="sha256_manifest")
            lines = path.read_text().splitlines()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}", param="sha256_manifest") from None
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: is not text", param="sha256_manifest") from None
        digests: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            if (match := _LINE.fullmatch(line)) is None:
                raise CheckpointError(f"{path}: line {number} is not one of sha256sum's", param="sha256_manifest")
            name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], match[3]) if match[1] else match[3]
            for directory in (path.parent, Path(ckpt_dir)):
                if digests.setdefault(_absolute(directory / name), match[2].lower()) != match[2].lower():
                    raise CheckpointError(f"{path}: line {number} contradicts another one", param="sha256_manifest")
        return cls(str(path), digests)

    def check_complete(self, ckpt_dir: str | Path) -> None:
        """Raises CheckpointError where params.json or a shard lacks its entry, or its file. Reads none of them."""
        for file in files_of(ckpt_dir):
            self.expected(file)
        for name in self.digests:
            is_ours = os.path.dirname(name) == os.path.abspath(ckpt_dir) and _OURS.fullmatch(os.path.basename(name))
            if is_ours and not os.path.exists(name):
                raise CheckpointError(f"{name}: {self.path} names it, but there is no such file")

    def verify(self, files: Sequence[Path], num_threads: int = 1) -> None:
        """Read `files`, several at a time. Raises CheckpointError that names the first one which is not what it must be."""
        for file, found in zip(files, sha256_of_each(files, num_threads), strict=True):
            if found != self.expected(file):
                raise CheckpointError(f"{file}: its SHA-256 is {found}, {self.path} says {self.expected(file)}")

    def expected(self, file: Path) -> str:
        """The SHA-256 that `file` must have. Raises CheckpointError if the manifest does not list it."""
        expected = self.digests.get(_absolute(file))
        if expected is None:
            raise CheckpointError(f"{file}: {self.path} has no entry for it")
        return expected


def _absolute(path: Path) -> str:
    """By its name alone: a link's target may have any other."""
    return os.path.abspath(path)
