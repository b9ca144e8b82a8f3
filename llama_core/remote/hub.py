"""Models of a Hugging Face hub, by huggingface_hub: its cache, locks, resumption and variables (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE)."""

import difflib
import glob
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import huggingface_hub
from huggingface_hub import constants

from llama_core.errors import FetchError, Unreachable
from llama_core.remote.model_files import RemoteFile, RemoteModel
from llama_core.remote.names import RemoteName

_TIMEOUT_S: Final = 30.0
_SHA256_DIGITS: Final = 64
_SHOWN: Final = 8
_SEARCHED: Final = 50
_HTTP_LIBRARIES: Final = ("httpx", "httpx2", "requests", "urllib3")  # that versions of huggingface_hub use

constants.HF_HUB_DISABLE_TELEMETRY = True  # else each process first asks the hub what it knows of its environment


class HubStore:
    """Implements `llama_core.remote.store.Store`."""

    def listed(self, name: RemoteName) -> tuple[str, Sequence[RemoteFile]]:
        with _explained(name):
            api = huggingface_hub.HfApi()
            found = api.model_info(name.path, revision=name.revision or None, timeout=_TIMEOUT_S, files_metadata=True)
        files = [
            RemoteFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs is not None else "")
            for each in found.siblings or ()
        ]
        assert found.sha is not None
        return found.sha, files

    def listed_in_cache(self, name: RemoteName) -> tuple[str, Sequence[RemoteFile]] | None:
        """What another program, such as `hf download`, has left in the library's cache."""
        commit = name.revision
        if not name.is_pinned:
            try:
                commit = (_folder(name) / "refs" / (name.revision or "main")).read_text().strip()
            except OSError:
                return None
        snapshot = _folder(name) / "snapshots" / commit
        links = sorted(path for path in snapshot.rglob("*") if path.is_file())
        names = [(link, link.relative_to(snapshot).as_posix(), link.resolve().name) for link in links]
        files = [
            RemoteFile(own, link.stat().st_size, blob if len(blob) == _SHA256_DIGITS else "")
            for link, own, blob in names
        ]
        return (commit, files) if files else None

    def read(self, name: RemoteName, file: str, begin: int, end: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        with _explained(name):
            url = huggingface_hub.hf_hub_url(name.path, file, revision=name.revision)
            headers = build_hf_headers() | {"range": f"bytes={begin}-{end - 1}"}
            answer = get_session().get(url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S)
            hf_raise_for_status(answer)
        content: bytes = answer.content
        content = content if answer.status_code == 206 else content[begin:end]
        if len(content) != end - begin:
            raise FetchError(f"{name}: {url} sends {len(content)} bytes where {end - begin} were asked for")
        return content

    def folder(self, name: RemoteName) -> Path:
        return _folder(name) / "snapshots" / name.revision

    def unfinished(self, name: RemoteName) -> Iterator[Path]:
        return (_folder(name) / "blobs").glob("*.incomplete")

    def fetch(self, model: RemoteModel, files: Sequence[RemoteFile]) -> None:
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
        what = f"is gated: accept its terms at {hub}/{name.path}, and set HF_TOKEN to a token of that account"
    except errors.RepositoryNotFoundError:
        what = f"is not at {hub}{_similar(name)}; if it is private, set HF_TOKEN to a token that may read it"
    except errors.RevisionNotFoundError:
        what = f"has no revision {name.revision!r}"
    except errors.HFValidationError as error:
        what = f"is not the name of a model: {error}"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _unreachable(name, error) from None
    except errors.EntryNotFoundError as error:
        what = str(error)
    except errors.HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise _unreachable(name, error) from None
        what = f"{hub} answers {error.response.status_code}: {error.server_message or error}"
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise _unreachable(name, error) from None
        what = f"{error.filename or _folder(name)}: {error.strerror}; HF_HOME names another directory for the cache"
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
        return f"other files of it, of revision {', '.join(revisions[:_SHOWN])}"
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
