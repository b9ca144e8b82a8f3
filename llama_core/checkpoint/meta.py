"""Meta's checkpoint format: params.json and the shards consolidated.00.pth, .01, ... in one directory.

Checks that every shard exists once, undamaged and under its own name. Reads no weight: `weights/meta.py` does, with torch.
"""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_core.errors import CheckpointError
from llama_core.files.generation_config import generation_files, read_stop_ids
from llama_core.files.meta_params import may_be_tied, read_params
from llama_core.files.source import CheckpointSource, WeightReader
from llama_core.files.text_files import fault_of
from llama_core.model.config import ModelConfig
from llama_core.model.weights import OUTPUT

_SHARD_NAME = re.compile(r"consolidated\.(\d+)\.pth")
_MAX_PICKLE_BYTES = 64 * 2**20  # of the list of tensors; Llama's largest has a few hundred kilobytes
_OWN_NAME = re.compile(r"params\.json|consolidated\..*\.pth")


NO_DIRECTORY = "no such directory; ckpt_dir may also be the name of a model of a hub, ORG/NAME, which is then fetched"
_A_FILE = "a file in no known format: give the folder with the model's files, or a .gguf file"


class MetaCheckpoint(CheckpointSource):
    """A directory in Meta's format."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """True for every path: this class comes last in the registry, and its errors explain what is wrong with a path."""
        return True

    @property
    def files(self) -> Sequence[Path]:
        """The metadata, and every file with a shard's name."""
        return [*self.metadata_files, *sorted(self.path.glob("consolidated.*.pth"))]

    @property
    def metadata_files(self) -> Sequence[Path]:
        """params.json, whether it exists or not; generation_config.json and config.json where they exist."""
        return [self.path / "params.json", *generation_files(self.path)]

    @property
    def stop_ids(self) -> frozenset[int]:
        """The values of eos_token_id in generation_config.json and config.json: params.json names no token."""
        return read_stop_ids(self.path)

    def owns(self, name: str) -> bool:
        return _OWN_NAME.fullmatch(name) is not None

    def num_shards(self) -> int:
        return len(find_shards(self.path))

    def model_config(self, vocab_size: int) -> ModelConfig:
        config = read_params(self.path, vocab_size=vocab_size)
        return replace(config, tied_embeddings=has_no_output(self.path)) if may_be_tied(config) else config

    def open_weights(self, config: ModelConfig) -> WeightReader:
        from llama_core.weights.meta import MetaWeights  # imports torch

        return MetaWeights(self.path, find_shards(self.path), config)


def find_shards(directory: Path) -> list[Path]:
    """The shards in order: each is a whole archive, and no two are equal.

    Reads only the archives' directories, no weight. Raises CheckpointError that names the file.
    """
    if not directory.is_dir():
        found = _A_FILE if directory.is_file() else NO_DIRECTORY
        raise CheckpointError(f"{directory}: {found}", param="ckpt_dir")
    numbered: dict[int, Path] = {}
    for path in sorted(directory.glob("consolidated.*.pth")):
        match = _SHARD_NAME.fullmatch(path.name)
        if match is None:
            continue
        number = int(match[1])
        if number in numbered:
            raise CheckpointError(f"{path}: shard {number} is there twice, {numbered[number].name} too")
        numbered[number] = path
    if not numbered:
        raise CheckpointError(f"{directory}: no shard (consolidated.00.pth, ...) in it", param="ckpt_dir")
    for i in range(max(numbered) + 1):
        if i not in numbered:
            raise CheckpointError(f"{directory / f'consolidated.{i:02d}.pth'}: this shard is missing")
    shards = [numbered[i] for i in range(len(numbered))]
    _check_distinct(shards)
    return shards


def has_no_output(directory: Path) -> bool:
    """Whether the first shard names no output layer. Reads the archive's list of tensors; False for a damaged file."""
    try:
        with zipfile.ZipFile(directory / "consolidated.00.pth") as archive:
            record = next(each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
            return record.file_size <= _MAX_PICKLE_BYTES and OUTPUT.encode() not in archive.read(record)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, StopIteration):
        return False  # `find_shards` names the fault


def _check_distinct(shards: Sequence[Path]) -> None:
    """Raises CheckpointError for a shard that is damaged, has the name of another shard, or is a copy of another."""
    seen: dict[tuple[tuple[int, int], ...], Path] = {}
    for index, path in enumerate(shards):
        contents = _check_archive(path, index)
        has_checksums = len({crc for _, crc in contents}) > 1  # torch can write archives without checksums
        if has_checksums and contents in seen:
            raise CheckpointError(
                f"{path}: holds the same weights as {seen[contents].name}: one shard was copied twice"
            )
        seen[contents] = path


def _check_archive(path: Path, index: int) -> tuple[tuple[int, int], ...]:
    """Size and CRC-32 of each stored tensor, as the archive's directory states them."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        what = f"damaged, or not a checkpoint that torch.save has written: {error}"
        raise CheckpointError(f"{path}: {fault_of(path, what)}") from None
    size = path.stat().st_size
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise CheckpointError(f"{path}: an archive, but not a checkpoint that torch.save has written")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.header_offset + record.file_size > size:
            raise CheckpointError(f"{path}: damaged: record {record.filename!r} lies outside the file")
    # torch.save names the folder inside the archive after the file, so a renamed shard still shows its number.
    folder = records[0].filename.split("/")[0]
    match = re.fullmatch(r"consolidated\.(\d+)", folder)
    if match is not None and int(match[1]) != index:
        raise CheckpointError(f"{path}: holds shard {folder}: shards were swapped or renamed")
    return tuple((r.file_size, r.CRC) for r in records if "/data/" in r.filename)
