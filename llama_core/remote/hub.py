"""Models of a Hugging Face hub, by huggingface_hub: its cache, locks, resumption and variables (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE)."""

import difflib
import glob
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from llama_core.errors import FetchError, Unreachable
from llama_core.remote.model_files import RemoteFile, RemoteModel
from llama_core.remote.names import RemoteName

_TIMEOUT_S: Final = 30.0
_SHA256_DIGITS: Final = 64
_SHOWN: Final = 8
_SEARCHED: Final = 50
_HTTP_LIBRARIES: Final = ("httpx", "httpx2", "requests", "urllib3")  # that versions of huggingface_hub use

if not sys.stderr.isatty():
    disable_progress_bars()
constants.HF_HUB_DISABLE_TELEMETRY = True  # else each process first asks the hub what it knows of its environment


def listed(name: RemoteName) -> tuple[str, Sequence[RemoteFile]]:
    with _explained(name):
        api = huggingface_hub.HfApi()
        found = api.model_info(name.path, revision=name.revision or None, timeout=_TIMEOUT_S, files_metadata=True)
    files = [
        RemoteFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs is not None else "")
        for each in found.siblings or ()
    ]
    assert found.sha is not None
    return found.sha, files


def listed_in_cache(name: RemoteName) -> tuple[str, Sequence[RemoteFile]] | None:
    """What another program, such as `hf download`, has left in the library's cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = huggingface_hub.snapshot_download(name.path, revision=name.revision or None, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    snapshot = Path(found)
    links = sorted(path for path in snapshot.rglob("*") if path.is_file())
    names = [(link, link.relative_to(snapshot).as_posix(), link.resolve().name) for link in links]
    files = [
        RemoteFile(own, link.stat().st_size, blob if len(blob) == _SHA256_DIGITS else "") for link, own, blob in names
    ]
    return (snapshot.name, files) if files else None


def read(name: RemoteName, file: str, begin: int, end: int) -> bytes:
    with _explained(name):
        path = f"{name.path}@{name.revision}/{file}"
        content: bytes = huggingface_hub.HfFileSystem().cat_file(path, start=begin, end=end, cache_type="none")
        return content


def folder(name: RemoteName) -> Path:
    return _folder(name) / "snapshots" / name.revision


def unfinished(name: RemoteName) -> Iterator[Path]:
    return (_folder(name) / "blobs").glob("*.incomplete")


def fetch(model: RemoteModel, files: Sequence[RemoteFile]) -> None:
    with _explained(model.name):
        huggingface_hub.snapshot_download(
            model.name.path,
            revision=model.name.revision,
            allow_patterns=[glob.escape(file.name) for file in files],
        )


def _folder(name: RemoteName) -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.path.replace('/', '--')}"


@contextmanager
def _explained(name: RemoteName) -> Iterator[None]:
    """Turns the library's errors into FetchError with a remedy, and those of the network into Unreachable."""
    from huggingface_hub import errors  # imports an HTTP client, which a start from the cache does not need

    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        what = f"is gated: accept its terms at {hub}/{name.path}, and set HF_TOKEN to that account's"
    except errors.RepositoryNotFoundError:
        what = f"no such repository at {hub}{_similar(name)}; if it is private, set HF_TOKEN, or call `hf auth login`"
    except errors.RevisionNotFoundError:
        what = f"has no revision {name.revision!r}"
    except errors.HFValidationError as error:
        what = f"is not the name of a model: {error}"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _unreachable(name, error) from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise _unreachable(name, error) from None
        what = f"{hub} answers {error.response.status_code}: {error.server_message or error}"
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError):
            raise  # of this machine
        raise _unreachable(name, error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _HTTP_LIBRARIES:
            raise
        raise _unreachable(name, error) from None
    else:
        return
    raise FetchError(f"{name}: {what}", param="ckpt_dir")


def _unreachable(name: RemoteName, error: Exception) -> Unreachable:
    is_wanted = constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if is_wanted else f"{constants.ENDPOINT} cannot be reached ({_short(error)})"
    return Unreachable(f"{name}: {reason}, and the cache has {_cached(name)}", param="ckpt_dir")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else type(error).__name__


def _cached(name: RemoteName) -> str:
    """What the cache has instead: other revisions of the model, or other models."""
    revisions = sorted(path.name for path in (_folder(name) / "snapshots").glob("*"))
    if revisions:
        return f"only revision {', '.join(revisions[:_SHOWN])}, or not all of its files"
    models = sorted(path.name for path in _folder(name).parent.glob("models--*"))
    names = (model.removeprefix("models--").replace("--", "/", 1) for model in models)
    return ", ".join(itertools.islice(names, _SHOWN)) or "no model"


def _similar(name: RemoteName) -> str:
    """Names that were probably meant; "" where there are none, or the hub does not tell."""
    with suppress(Exception):
        author, _, words = name.path.partition("/")
        api = huggingface_hub.HfApi()
        lists = (api.list_models(author=author, limit=_SEARCHED), api.list_models(search=words, limit=_SEARCHED))
        found = {each.id for models in lists for each in models}
        if near := difflib.get_close_matches(name.path, found):
            return f" (did you mean {' or '.join(near)}?)"
    return ""
