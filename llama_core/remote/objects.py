"""Models in an object store or on a web server, by fsspec: s3fs for s3://, gcsfs for gs://, aiohttp for https://.

Stores publish no SHA-256. What decides is that names, sizes and ETags are those that were listed when the model was pinned.
"""

import hashlib
import json
import time
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
_PAUSES_S: Final = (0.5, 2.0, 8.0, 20.0)  # before a chunk is asked for again
_UNFINISHED: Final = ".incomplete"
_PACKAGES: Final = {"s3": "llama-on-ray[s3]", "gs": "llama-on-ray[gcs]"}
_VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or FSSPEC_GS_TOKEN=anon for a public bucket",
}


def listed(name: RemoteName) -> tuple[str, Sequence[RemoteFile]]:
    with _explained(name):
        if not (entries := _entries(name)):
            raise FileNotFoundError
    files = [RemoteFile(own, size) for own, (size, _) in sorted(entries.items())]
    revision = hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()[:16]
    if name.revision not in ("", revision):
        raise FetchError(
            f"{name.url}: has changed since the server started: start the application again", param="ckpt_dir"
        )
    return revision, files


def listed_in_cache(name: RemoteName) -> tuple[str, Sequence[RemoteFile]] | None:
    return None


def folder(name: RemoteName) -> Path:
    return cache_dir() / "objects" / name.file_name


def unfinished(name: RemoteName) -> Iterator[Path]:
    return folder(name).glob(f"*{_UNFINISHED}")


def fetch(model: RemoteModel, files: Sequence[RemoteFile]) -> None:
    listed(model.name)  # still what was pinned
    target = folder(model.name)
    target.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        list(threads.map(lambda file: _fetch(model.name, file, target / file.name), files))


def _fetch(name: RemoteName, file: RemoteFile, target: Path) -> None:
    """Goes on where an earlier call was ended."""
    if target.exists():
        return
    part = target.with_name(target.name + _UNFINISHED)
    with part.open("ab") as opened:
        while (at := opened.tell()) < file.size:
            opened.write(read(name, file.name, at, min(at + _CHUNK_BYTES, file.size)))
    part.replace(target)


def read(name: RemoteName, file: str, begin: int, end: int) -> bytes:
    for pause_s in (*_PAUSES_S, None):
        try:
            with _explained(name):
                content: bytes = _file_system(name).cat_file(_url(name, file), start=begin, end=end)
            break
        except Unreachable:
            if pause_s is None:
                raise
            time.sleep(pause_s)
    if len(content) != end - begin:
        raise FetchError(f"{name}: sends {len(content)} bytes of {file} where {end - begin} were asked for")
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
        entries[url.rpartition("/")[2]] = int(info["size"]), str(info.get("ETag") or info.get("etag") or "")
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
    except Exception as error:  # of fsspec, botocore, google.auth and aiohttp
        is_access = isinstance(error, PermissionError) or "redential" in type(error).__name__
        if not is_access or name.scheme not in _VARIABLES:
            raise Unreachable(f"{name}: {type(error).__name__}: {str(error)[:200]}", param="ckpt_dir") from None
        what = f"access is denied ({str(error)[:200]}): set {_VARIABLES[name.scheme]}"
    else:
        return
    raise FetchError(f"{name}: {what}", param="ckpt_dir")
