"""SHA256SUMS: the SHA-256 that each file of a checkpoint must have, and the comparison with the files. Knows no file format.

`sha256sum` writes this file and `sha256sum -c` reads it. The process that starts the model reads it once and sends its entries
to the ranks with their configuration, so that the ranks never use a manifest from another node.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llama_core.errors import CheckpointError
from llama_core.files.digest import sha256_of_each
from llama_core.files.source import CheckpointSource
from llama_core.files.text_files import as_utf8

FILE_NAME = "SHA256SUMS"
_MAX_BYTES = 16 * 2**20  # a shard given by mistake has gigabytes
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """path: of the manifest file. digests: SHA-256 in lower-case hex, by absolute path. Plain: crosses processes."""

    path: str
    digests: Mapping[str, str] = field(repr=False)

    @classmethod
    def find(cls, ckpt_dir: str | Path, path: str | Path | None = None) -> "Manifest | None":
        """The manifest at `path`, which must exist; without a `path`, SHA256SUMS in `ckpt_dir`, or None if there is none.

        ckpt_dir: a directory, or a file, whose directory then counts.
        """
        directory = Path(ckpt_dir).parent if Path(ckpt_dir).is_file() else Path(ckpt_dir)
        if path is None and not (directory / FILE_NAME).exists():
            return None
        return cls.read(directory / FILE_NAME if path is None else Path(path), directory)

    @classmethod
    def read(cls, path: Path, ckpt_dir: str | Path) -> "Manifest":
        """Read a manifest. Relative names in it are relative to its own directory, as for `sha256sum -c`, or to `ckpt_dir`.

        Raises CheckpointError that names the file and the line at fault.
        """
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{path}: has more than {_MAX_BYTES} bytes", param="sha256_manifest")
            lines = as_utf8(path.read_bytes()).decode().splitlines()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}", param="sha256_manifest") from None
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: is not text", param="sha256_manifest") from None
        digests: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            if (match := _LINE.fullmatch(line)) is None:
                raise CheckpointError(
                    f"{path}: line {number} is not in the format of sha256sum", param="sha256_manifest"
                )
            name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], match[3]) if match[1] else match[3]
            for directory in (path.parent, Path(ckpt_dir)):
                if digests.setdefault(_absolute(directory / name), match[2].lower()) != match[2].lower():
                    raise CheckpointError(f"{path}: line {number} contradicts another one", param="sha256_manifest")
        return cls(str(path), digests)

    def check_complete(self, source: CheckpointSource) -> None:
        """Raises CheckpointError for a file of the checkpoint without an entry, or an entry without a file."""
        for file in source.files:
            self.expected(file)
        directories = {os.path.dirname(_absolute(file)) for file in source.files}
        for name in self.digests:
            directory, base = os.path.split(name)
            if directory in directories and source.owns(base) and not os.path.exists(name):
                raise CheckpointError(f"{name}: {self.path} names it, but there is no such file")

    def verify_metadata(self, source: CheckpointSource, tokenizer_files: Sequence[Path]) -> None:
        """`verify` what the replica reads. A file with weights is left to the ranks, which read all of it."""
        with_weights = set(source.files) - set(source.metadata_files)
        self.verify(
            list(dict.fromkeys(each for each in [*tokenizer_files, *source.metadata_files] if each not in with_weights))
        )

    def verify(self, files: Sequence[Path], num_threads: int = 1) -> None:
        """Read `files`, `num_threads` at a time. Raises CheckpointError that names the first file with another SHA-256."""
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
    """The absolute path without following links: a manifest names the link, not its target."""
    return os.path.abspath(path)
