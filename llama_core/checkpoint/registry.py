"""Finds the checkpoint format of a path. Each format is one line in the table here."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol, cast

from llama_core.checkpoint.source import CheckpointSource

# Name -> class, imported on first use. The first class that recognizes the path opens it; the last class recognizes every
# path, so that its error says what is wrong with a path of no known format.
FORMATS: Final[Mapping[str, str]] = {
    "meta": "llama_core.checkpoint.meta:MetaCheckpoint",
}


class CheckpointFormat(Protocol):
    """A class in FORMATS."""

    def recognizes(self, path: Path) -> bool:
        """Whether a checkpoint of this format lies at `path`, by the names of the files there. Never raises."""

    def __call__(self, path: Path) -> CheckpointSource:
        """Describe the checkpoint at `path`. Reads nothing."""


def open_checkpoint(path: str | Path) -> CheckpointSource:
    """The checkpoint at `path`, a directory or a file. Reads only names of files; see `CheckpointSource` for errors."""
    formats = [_import(target) for target in FORMATS.values()]
    chosen = next((each for each in formats if each.recognizes(Path(path))), formats[-1])
    return chosen(Path(path))


def _import(target: str) -> CheckpointFormat:
    module, _, name = target.partition(":")
    return cast(CheckpointFormat, getattr(importlib.import_module(module), name))
