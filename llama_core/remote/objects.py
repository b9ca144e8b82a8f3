"""Models in an object store or on a web server, by fsspec: s3fs for s3://, gcsfs for gs://, aiohttp for https://.

Stores publish no SHA-256. What decides is that names, sizes and ETags are those that were listed when the model was pinned.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from llama_core.errors import FetchError, Unreachable
from llama_core.files.gguf.model import SUFFIX
from llama_core.host.cache_dir import cache_dir
from llama_core.remote.model_files import RemoteFile, RemoteModel
from llama_core.remote.names import RemoteName

_CHUNK_BYTES: Final = 32 * 2**20
_NUM_THREADS: Final = 4
_NUM_TRIES: Final = 5  # of one chunk
_UNFINISHED: Final = ".incomplete"
_PACKAGES: Final = {"s3": "llama-on-ray[s3]", "gs": "llama-on-ray[gcs]"}
_VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or FSSPEC_GS_TOKEN=anon for a public bucket",
}


class ObjectStore:
    """Implements `llama_core.remote.store.Store`."""

    def listed(self, name: RemoteName) -> tuple[str, Sequence[RemoteFile]]:
        with _explained(name):
            if not (entries := _entries(name)):
                raise FileNotFoundError
        files = [RemoteFile(own, size) for own, (size, _) in sorted(entries.items())]
        revision = hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()[:16]
        if name.revision not in ("", revision):
            raise FetchError(
                f"{name.url}: has changed since the server started: start all nodes again", param="ckpt_dir"
            )
        return revision, files

    def listed_in_cache(self, name: RemoteName) -> tuple[str, Sequence[RemoteFile]] | None:
        return None

    def read(self, name: RemoteName, file: str, begin: int, end: int) -> bytes:
        with _explained(name):
            return _read(name, file, begin, end)

    def folder(self, name: RemoteName) -> Path:
        return cache_dir() / "objects" / name.file_name

    def unfinished(self, name: RemoteName) -> Iterator[Path]:
        return self.folder(name).glob(f"*{_UNFINISHED}")

    def fetch(self, model: RemoteModel, files: Sequence[RemoteFile]) -> None:
        self.listed(model.name)  # still what was pinned
        folder = self.folder(model.name)
        folder.mkdir(parents=True, exist_ok=True)
        with _explained(model.name), ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(lambda file: _fetch(model.name, file, folder / file.name), files))


def _fetch(name: RemoteName, file: RemoteFile, target: Path) -> None:
    """Goes on where an earlier call was ended."""
    if target.exists():
        return
    part = target.with_name(target.name + _UNFINISHED)
    with part.open("ab") as opened:
        while (at := opened.tell()) < file.size:
            opened.write(_read(name, file.name, at, min(at + _CHUNK_BYTES, file.size)))
    part.replace(target)


def _read(name: RemoteName, file: str, begin: int, end: int) -> bytes:
    for tries_left in reversed(range(_NUM_TRIES)):
        try:
            content: bytes = _file_system(name).cat_file(_url(name, file), start=begin, end=end)
            break
        except FileNotFoundError:
            raise
        except Exception:
            if not tries_left:
                raise
    if len(content) != end - begin:
        raise FetchError(
            f"{_url(name, file)}: the server sends {len(content)} bytes where {end - begin} were asked for"
        )
    return content


def _entries(name: RemoteName) -> dict[str, tuple[int, str]]:
    """Size and ETag of each file, by its name."""
    if "@" in name.path.partition("/")[0]:
        raise FetchError("a URL must have no user name: it stands in logs")
    file_system = _file_system(name)
    file_system.invalidate_cache()
    if name.path.endswith(SUFFIX):
        found = {name.url: file_system.info(name.url)}
    elif name.scheme in _PACKAGES:
        found = file_system.find(name.url, maxdepth=1, detail=True)
    else:
        raise FetchError(f"{name}: must end in {SUFFIX}: a web server cannot be asked which files a folder has")
    entries = {}
    for url, info in found.items():
        if info.get("size") is None:
            raise FetchError(f"{url}: the server does not tell its size")
        entries[url.rpartition("/")[2]] = int(info["size"]), str(info.get("ETag") or "")
    return entries


def _url(name: RemoteName, file: str) -> str:
    return name.url if name.path.endswith(SUFFIX) else f"{name.url}/{file}"


def _file_system(name: RemoteName) -> Any:
    """fsspec keeps one for each scheme."""
    import fsspec

    return fsspec.filesystem(name.scheme)


@contextmanager
def _explained(name: RemoteName) -> Iterator[None]:
    """Turns the libraries' errors into FetchError with a remedy, and those of the network into Unreachable."""
    try:
        yield
    except FetchError:
        raise
    except ImportError as error:
        package = _PACKAGES.get(name.scheme, "aiohttp")
        what = f"needs a package that is not installed ({error}): pip install '{package}' on every node"
    except FileNotFoundError:
        what = "there is no such file, folder or bucket"
    except PermissionError as error:
        what = f"access is denied ({error}): set {_VARIABLES.get(name.scheme, 'nothing')}"
    except OSError as error:
        if error.errno is None or isinstance(error, (ConnectionError, TimeoutError)):
            raise Unreachable(f"{name}: cannot be reached: {error}", param="ckpt_dir") from None
        what = f"{error.filename or error}: {error.strerror}; LLAMA_CACHE_DIR names another directory"
    except Exception as error:  # of botocore, google.auth and aiohttp
        if "redential" in type(error).__name__:
            what = f"no credentials: set {_VARIABLES.get(name.scheme)}"
        else:
            raise Unreachable(f"{name}: {type(error).__name__}: {str(error)[:200]}", param="ckpt_dir") from None
    else:
        return
    raise FetchError(f"{name}: {what}", param="ckpt_dir")
