"""Remote models on this node: pinned to one revision, fetched once into the node's cache, and outlined from headers alone.

A record of what was pinned is kept beside the cache, so that a later start needs no network.
"""

import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, Protocol

from filelock import FileLock

from llama_core.errors import CheckpointError, DamagedDownload, FetchError, Unreachable
from llama_core.files.digest import sha256_of
from llama_core.files.gguf.file import GgufFile
from llama_core.files.gguf.model import SUFFIX
from llama_core.host.cache_dir import cache_dir
from llama_core.remote.model_files import Kind, RemoteFile, RemoteModel, chosen_files
from llama_core.remote.names import HUB, RemoteName, remote_name
from llama_core.sizes import format_bytes

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_WEIGHTS: Final = (".safetensors", SUFFIX)
_MAX_SAFETENSORS_HEADER: Final = 16 * 2**20
_FIRST_GGUF_READ, _MAX_GGUF_HEADER = 2 * 2**20, 2**28
_LOOK_EVERY_S: Final = 1.0
_FREE_BYTES: Final = 64 * 2**20  # that a download leaves


class Store(Protocol):
    """Where remote models lie. Methods raise FetchError with a remedy; Unreachable where the network is at fault."""

    def listed(self, name: RemoteName) -> tuple[str, Sequence[RemoteFile]]:
        """The revision, and all its files."""

    def listed_in_cache(self, name: RemoteName) -> tuple[str, Sequence[RemoteFile]] | None:
        """The same of files that another program has fetched; None if there are none."""

    def read(self, name: RemoteName, file: str, begin: int, end: int) -> bytes:
        """A range of a file of a pinned model."""

    def folder(self, name: RemoteName) -> Path:
        """Where the files of a pinned model are on this node, by their names."""

    def unfinished(self, name: RemoteName) -> Iterator[Path]: ...
    def fetch(self, model: RemoteModel, files: Sequence[RemoteFile]) -> None:
        """Download files that are not in the folder. Goes on where an earlier call was ended."""


def store_of(name: RemoteName) -> Store:
    from llama_core.remote import hub, objects

    return hub if name.scheme == HUB else objects


def pin(name: RemoteName, kind: Kind = "model") -> RemoteModel:
    """The model's present revision and the files that it needs. Of a pinned name, and where the network is away, what is
    recorded on this node. Raises FetchError."""
    if name.is_pinned and (recorded := _recorded(name, kind)) is not None:
        return recorded
    store = store_of(name)
    try:
        revision, files = store.listed(name)
    except Unreachable as error:
        if (recorded := _recorded(name, kind)) is not None and local_path(recorded) is not None:
            log.warning("%s; going on with %s of an earlier start", error.message, recorded.name)
            return recorded
        if (cached := store.listed_in_cache(name)) is None:
            raise
        revision, files = cached
    pinned = name.pinned(revision)
    sizes = {file.name: file.size for file in files}
    model = chosen_files(pinned, kind, files, lambda file: _content(store, pinned, file, sizes[file]))
    for each in (name, model.name):
        _record(each, kind, model)
    return model


def _content(store: Store, name: RemoteName, file: str, size: int) -> bytes:
    here = store.folder(name) / file
    return here.read_bytes() if here.is_file() else store.read(name, file, 0, size)


def local_path(model: RemoteModel) -> Path | None:
    """The folder, or the GGUF file, on this node; None unless every file is there as a whole."""
    folder = store_of(model.name).folder(model.name)
    try:
        is_whole = all((folder / file.name).stat().st_size == file.size for file in model.files)
    except OSError:
        return None
    return folder / model.name.main if is_whole else None


def local(path: str) -> str:
    """A path as it is; of a pinned name, where `fetch` puts the model on this node."""
    name = remote_name(path) if "://" in path else None
    if name is None:
        return path
    return str(store_of(name).folder(name) / name.main)


def fetch(model: RemoteModel, on_progress: Progress = lambda done, total: None) -> Path:
    """As `local_path`, after a download where files are missing; of several processes on a node, one downloads. Raises
    FetchError. on_progress: gets bytes that are here, and all bytes."""
    with _watching(model, on_progress), FileLock(cache_dir() / f"{model.name.file_name}.lock"):
        path = local_path(model)
        if path is None:
            missing = check_disk(model)
            log.info("fetching %s: %s", model.name, format_bytes(missing))
            _fetch(model, model.files)
            path = local_path(model)
    if path is None:
        raise FetchError(f"{model.name}: files have other sizes than were listed: start again", param="ckpt_dir")
    return path


def _fetch(model: RemoteModel, files: Sequence[RemoteFile]) -> None:
    try:
        store_of(model.name).fetch(model, files)
    except OSError as error:  # of this machine: stores explain their own
        what = f"{error.filename or 'the cache'}: {error.strerror or error}"
        raise FetchError(f"{model.name}: {what}; {_cache_variable(model)} names another directory") from None


def _cache_variable(model: RemoteModel) -> str:
    return "HF_HOME" if model.name.scheme == HUB else "LLAMA_CACHE_DIR"


def check_downloads(model: RemoteModel, digests: Mapping[str, str] | None = None) -> None:
    """Compare files with the SHA-256 that the hub publishes. Removes damaged ones, so that the next `fetch` downloads them
    again, and raises DamagedDownload. digests: SHA-256 by the file's last name, where they are known; else files are read."""
    folder = store_of(model.name).folder(model.name)
    for file in model.files:
        path = folder / file.name
        found = _sha256(path) if digests is None else digests.get(path.name, file.sha256)
        if file.sha256 in ("", found):
            continue
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise DamagedDownload(
            f"{model.name}: {file.name} was damaged: its SHA-256 is {found}, the hub publishes {file.sha256}; the file is "
            "removed, and downloaded again",
            param="ckpt_dir",
        )


def _sha256(path: Path) -> str:
    """Of a file that another rank of this node may have removed."""
    try:
        return sha256_of(path)
    except CheckpointError:
        return "absent"


def outline(model: RemoteModel) -> Path:
    """As `local_path`, without weights: where files are missing, a copy with the headers of the files of weights, whose rest
    is a hole. Readers of headers find in it what they need. Raises FetchError."""
    if (path := local_path(model)) is not None:
        return path
    folder = cache_dir() / "outlines" / model.name.file_name
    if not all((folder / file.name).exists() for file in model.files):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _write_outline(model, made)
            with suppress(OSError):  # another process was faster
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / model.name.main


def _write_outline(model: RemoteModel, folder: Path) -> None:
    store = store_of(model.name)
    texts = [file for file in model.files if not file.name.endswith(_WEIGHTS)]
    if texts:
        _fetch(model, texts)
    for file in model.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in texts:
            target.symlink_to((store.folder(model.name) / file.name).absolute())
            continue
        with target.open("wb") as opened:
            opened.truncate(file.size)
        write_head = _write_gguf_head if file.name.endswith(SUFFIX) else _write_safetensors_head
        write_head(target, file.size, lambda begin, end, name=file.name: store.read(model.name, name, begin, end))  # type: ignore[misc]


def _write_safetensors_head(target: Path, size: int, read: Callable[[int, int], bytes]) -> None:
    head = read(0, min(8, size))
    length = int.from_bytes(head, "little")
    if length <= min(_MAX_SAFETENSORS_HEADER, size - 8):  # else its reader refuses the file
        head += read(8, 8 + length)
    _write_at(target, 0, head)


def _write_gguf_head(target: Path, size: int, read: Callable[[int, int], bytes]) -> None:
    """Nothing in the file tells the header's length: read more until its parts are all there."""
    done, wanted = 0, _FIRST_GGUF_READ
    while done < min(size, _MAX_GGUF_HEADER):
        end = min(size, wanted)
        _write_at(target, done, read(done, end))
        done, wanted = end, 2 * wanted
        with suppress(CheckpointError):  # it ends in the hole
            if min((tensor.offset for tensor in GgufFile(target).tensors.values()), default=size) <= done:
                return


def _write_at(target: Path, at: int, content: bytes) -> None:
    with target.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def _bytes_here(model: RemoteModel, *, with_unfinished: bool) -> int:
    store = store_of(model.name)
    paths = [store.folder(model.name) / file.name for file in model.files]
    sizes = 0
    for path in [*paths, *(store.unfinished(model.name) if with_unfinished else ())]:
        with suppress(OSError):
            sizes += path.stat().st_size
    return min(sizes, model.size)


@contextmanager
def _watching(model: RemoteModel, on_progress: Progress) -> Iterator[None]:
    """Tell the bytes that are here, every second, also while another process downloads."""
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(_LOOK_EVERY_S):
            on_progress(_bytes_here(model, with_unfinished=True), model.size)

    thread = threading.Thread(target=watch, daemon=True, name="fetch-progress")
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def check_disk(model: RemoteModel) -> int:
    """The bytes that are missing here. Raises FetchError where they do not fit."""
    folder = store_of(model.name).folder(model.name)
    place = next(each for each in (folder, *folder.parents) if each.exists())
    missing = model.size - _bytes_here(model, with_unfinished=model.name.scheme != HUB)
    free = shutil.disk_usage(place).free
    if free < missing + _FREE_BYTES:
        raise FetchError(
            f"{model.name}: needs {format_bytes(missing)} more in {place}, where {format_bytes(free)} are free: make room, or "
            f"set {_cache_variable(model)} to another directory",
            param="ckpt_dir",
        )
    return missing


def by_name(text: str, models: Sequence[RemoteModel]) -> str:
    """The text with names of remote models in place of their paths here."""
    for model in models:
        for folder in (cache_dir() / "outlines" / model.name.file_name, store_of(model.name).folder(model.name)):
            text = text.replace(str(folder), str(model.name))
    return text


def fetched(path: str | Path, kind: Kind = "model") -> Path:
    """A path as it is; of a remote model's name, the path of its files, which are downloaded and checked. Raises FetchError."""
    if (name := remote_name(str(path))) is None:
        return Path(path)
    model = pin(name, kind)
    if (here := local_path(model)) is None:
        here = fetch(model)
        check_downloads(model)
    return here


def _record_path(name: RemoteName, kind: Kind) -> Path:
    return cache_dir() / "remote" / f"{name.file_name}.{kind}.json"


def _recorded(name: RemoteName, kind: Kind) -> RemoteModel | None:
    try:
        given = json.loads(_record_path(name, kind).read_bytes())
        files = tuple(RemoteFile(**file) for file in given["files"])
        return RemoteModel(RemoteName(**given["name"]), files)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _record(name: RemoteName, kind: Kind, model: RemoteModel) -> None:
    path = _record_path(name, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(model)))
    unfinished.replace(path)
