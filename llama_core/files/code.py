"""The version of the code that decides which tokens follow a prompt. Loads none of it."""

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_SOURCES: Final = ("backends", "checkpoint", "files", "grammar", "model", "weights")
_LIBRARIES: Final = ("torch", "llguidance")


def code_version(root: Path = _ROOT) -> str:
    """A digest of the sources that read weights, compute, sample and mask, as they are on the disk now, and of their libraries'
    versions. Takes some milliseconds. root: the folder of this package."""
    digest = hashlib.sha256(" ".join(map(_version, _LIBRARIES)).encode())
    files = (file for name in _SOURCES for file in (root / name).rglob("*") if file.suffix in (".py", ".hpp", ".cpp"))
    for file in sorted(files):
        source = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # it is not installed as a package
        return ""
