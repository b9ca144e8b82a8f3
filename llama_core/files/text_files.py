"""What editors and version control make of a file: byte order marks, UTF-16, pointers in place of large files."""

import codecs
import errno
from contextlib import suppress
from pathlib import Path
from typing import Final

LFS_POINTER: Final = "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file"


def as_utf8(data: bytes) -> bytes:
    """Text without its byte order mark. Raises OSError for UTF-16, as Windows' shell writes it, and for UTF-32."""
    if b"\0" in data:
        raise OSError(errno.EILSEQ, "not text in UTF-8: save it again in UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def fault_of(path: Path, otherwise: str = "") -> str:
    """What is wrong with a file that cannot be parsed: it is a pointer, else `otherwise`."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/"):
            return LFS_POINTER
    return otherwise
