"""One GGUF model: a file, or the parts of a split one (-00001-of-0000N.gguf) that lie beside the first. Needs no torch."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from llama_core.errors import CheckpointError
from llama_core.files.gguf.file import GgufFile, GgufTensor, Metadata

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


class GgufModel:
    """The headers of one model. Reads the first file's header when `metadata` is used, and the others' with `tensors`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _first(self) -> GgufFile:
        return GgufFile(self.path)

    @property
    def metadata(self) -> Metadata:
        """Of the first part, which describes the model. Raises CheckpointError, as `tensors` does."""
        return self._first.metadata

    @property
    def files(self) -> Sequence[Path]:
        """Every part, in order, by the name of the first; whether they exist or not. Reads nothing."""
        match = _PART.fullmatch(self.path.name)
        if match is None or int(match[2]) != 1 or not int(match[3]) >= 1:
            return [self.path]
        parts = (f"{match[1]}-{number:05d}-of-{match[3]}{SUFFIX}" for number in range(1, int(match[3]) + 1))
        return [self.path.with_name(name) for name in parts]

    def owns(self, name: str) -> bool:
        """Whether the name is that of a part of this model."""
        own, other = _PART.fullmatch(self.path.name), _PART.fullmatch(name)
        return name == self.path.name or (own is not None and other is not None and own[1] == other[1])

    @cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        """The tensors of all parts, by name. Raises CheckpointError for parts that are missing or do not belong together."""
        self._check_first()
        tensors = dict(self._first.tensors)
        for number, path in enumerate(self.files[1:], 1):
            part = GgufFile(path)
            _check_number(part, number, len(self.files))
            if both := tensors.keys() & part.tensors.keys():
                raise CheckpointError(f"{path}: its tensor {min(both)[:80]!r} is in another part too")
            tensors |= part.tensors
        stated = self.metadata.get(_NUM_TENSORS, len(tensors))
        if stated != len(tensors):
            raise CheckpointError(f"{self.path}: states {stated} tensors, but its parts hold {len(tensors)}")
        return tensors

    def _check_first(self) -> None:
        count = self.metadata.get(_COUNT, 0)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise CheckpointError(f"{self.path}: {_COUNT} must be the number of parts, is {repr(count)[:80]}")
        if count in (0, 1) and len(self.files) == 1:
            return
        if _PART.fullmatch(self.path.name) is None:
            raise CheckpointError(
                f"{self.path}: is one of {count} parts, but its name does not end in -00001-of-{count:05d}.gguf, by which "
                "the other parts are found",
                param="ckpt_dir",
            )
        _check_number(self._first, 0, len(self.files))


def is_later_part(name: str) -> bool:
    """Whether the name is that of a part of a split model which is not the first."""
    match = _PART.fullmatch(name)
    return match is not None and int(match[2]) > 1


def refuse_later_part(path: Path, param: str) -> None:
    """Raises CheckpointError for a part of a split model that is not the first. Reads only the name."""
    if is_later_part(path.name) and (match := _PART.fullmatch(path.name)):
        first = f"{match[1]}-00001-of-{match[3]}{SUFFIX}"
        raise CheckpointError(f"{path}: is a later part of a split model: set {param} to {first}", param=param)


def find_models(folder: Path) -> list[Path]:
    """The GGUF models in a folder, of a split one its first part, by name. Reads only names."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    return [file for file in files if not is_later_part(file.name)]


def _check_number(part: GgufFile, number: int, count: int) -> None:
    found = (part.metadata.get(_NUMBER), part.metadata.get(_COUNT))
    if found != (number, count):
        raise CheckpointError(
            f"{part.path}: says that it is part {found[0]} of {found[1]} (counted from 0), expected part {number} of "
            f"{count}: give the first part's name, and keep the parts' names",
            param="ckpt_dir",
        )
