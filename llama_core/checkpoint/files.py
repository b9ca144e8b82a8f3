"""The files of a checkpoint: whether every shard is there, once, whole and in its place. Reads no weight."""

import hashlib
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from llama_core.errors import CheckpointError
from llama_core.host_memory import host_identity


def find_shards(ckpt_dir: str | Path) -> list[Path]:
    """The shard files consolidated.00.pth, .01, ... in order, each a whole archive and none twice.

    Reads only the archives' directories, no weight. Raises CheckpointError that names the file.
    """
    directory = Path(ckpt_dir)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory", param="ckpt_dir")
    numbered: dict[int, Path] = {}
    for path in sorted(directory.glob("consolidated.*.pth")):
        match = re.fullmatch(r"consolidated\.(\d+)\.pth", path.name)
        if match is None:
            continue
        if int(match[1]) in numbered:
            raise CheckpointError(f"{path}: shard {int(match[1])} is there twice, {numbered[int(match[1])].name} too")
        numbered[int(match[1])] = path
    if not numbered:
        raise CheckpointError(f"{directory}: no shard (consolidated.00.pth, ...) in it", param="ckpt_dir")
    for i in range(max(numbered) + 1):
        if i not in numbered:
            raise CheckpointError(f"{directory / f'consolidated.{i:02d}.pth'}: this shard is missing")
    shards = [numbered[i] for i in range(len(numbered))]
    seen: dict[tuple[tuple[int, int], ...], Path] = {}
    for index, path in enumerate(shards):
        contents = _check_archive(path, index)
        told_apart = len({crc for _, crc in contents}) > 1  # torch can be told to write no checksums
        if told_apart and contents in seen:
            raise CheckpointError(
                f"{path}: holds the same weights as {seen[contents].name}: one shard was copied twice"
            )
        seen[contents] = path
    return shards


def files_of(ckpt_dir: str | Path) -> list[Path]:
    """params.json, be it there or not, and all that is called like a shard, in order. Nothing is read."""
    return [Path(ckpt_dir) / "params.json", *sorted(Path(ckpt_dir).glob("consolidated.*.pth"))]


def identity(files: Sequence[Path]) -> int:
    """A number below 2**63 that changes with the files, and that two processes share only if they see the very same ones, on
    one host. Nothing is read: the kernel notes each change of a file, with a time that nobody else can set.
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


def _check_archive(path: Path, index: int) -> tuple[tuple[int, int], ...]:
    """Size and CRC-32 of each stored tensor, as the archive's directory states them."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged, or not a checkpoint that torch.save has written: {error}") from None
    size = path.stat().st_size
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise CheckpointError(f"{path}: an archive, but not a checkpoint that torch.save has written")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.header_offset + record.file_size > size:
            raise CheckpointError(f"{path}: damaged: record {record.filename!r} lies outside the file")
    # torch.save names the folder inside the archive after the file: a renamed shard still says which one it was.
    folder = records[0].filename.split("/")[0]
    match = re.fullmatch(r"consolidated\.(\d+)", folder)
    if match is not None and int(match[1]) != index:
        raise CheckpointError(f"{path}: holds shard {folder}: shards were swapped or renamed")
    return tuple((r.file_size, r.CRC) for r in records if "/data/" in r.filename)
