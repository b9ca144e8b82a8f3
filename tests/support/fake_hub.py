"""Hugging Face's hub on loopback, as `huggingface_hub` speaks to it: metadata, files by range and redirect, tokens, faults.

    python -m tests.support.fake_hub FOLDER --port 8800     # serves each folder org/name below FOLDER

It names no Xet storage, so files come by plain HTTP. A connection carries one request."""

import argparse
import hashlib
import io
import json
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

Json = dict[str, Any]
Files = Mapping[str, bytes | Path] | Path  # by name; or a folder that has them

LFS_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pth", ".model")
LFS_BYTES: Final = 10_000_000  # larger files are in LFS whatever their name
INVERTED: Final = bytes(range(255, -1, -1))


def listed(files: Files) -> Mapping[str, bytes | Path]:
    if isinstance(files, Path):
        return {path.relative_to(files).as_posix(): path for path in files.rglob("*") if path.is_file()}
    return files


def opened(content: bytes | Path) -> io.BufferedReader | io.BytesIO:
    return content.open("rb") if isinstance(content, Path) else io.BytesIO(content)


class _File:
    def __init__(self, name: str, content: bytes | Path) -> None:
        self.name, self.content, self.lfs = name, content, dict[str, Any]()
        self.size = content.stat().st_size if isinstance(content, Path) else len(content)
        with opened(content) as source:
            if name.endswith(LFS_SUFFIXES) or self.size > LFS_BYTES:
                sha256 = hashlib.file_digest(source, "sha256").hexdigest()
                in_git = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {self.size}\n".encode()
                self.lfs = {"lfs": {"sha256": sha256, "oid": sha256, "size": self.size, "pointerSize": len(in_git)}}
            else:
                in_git = source.read()
        self.blob_id = hashlib.sha1(b"blob %d\0" % len(in_git) + in_git).hexdigest()
        self.entry = {"type": "file", "path": name, "oid": self.blob_id, "size": self.size} | self.lfs


@dataclass
class _Repository:
    name: str
    gated: bool = False
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)

    def sha(self, revision: str) -> str:
        if (sha := self.branches.get(revision, revision)) not in self.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def model(self, revision: str, with_blobs: bool) -> Json:
        files = self.commits[sha := self.sha(revision)].values()
        blobs = {f.name: {"size": f.size, "blobId": f.blob_id} | f.lfs if with_blobs else {} for f in files}
        siblings = [{"rfilename": name} | blob for name, blob in blobs.items()]
        access = {"gated": "manual" if self.gated else False, "private": self.private}
        return {"id": self.name, "sha": sha, "siblings": siblings, "tags": []} | access

    def entries(self, revision: str) -> dict[str, Json]:
        """Its files and folders by path."""
        files = self.commits[self.sha(revision)]
        folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
        of_folders = {path: {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders}
        return dict(sorted((of_folders | {path: file.entry for path, file in files.items()}).items()))


class FakeHub:
    def __init__(self, port: int = 0) -> None:
        self.tokens: set[str] = set()  # valid, and with access to each private and gated repository
        self.tokens_without_access: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []  # method, path without query, Range header
        self.bytes_served: Counter[str] = Counter()  # of bodies, by the file's name in its repository
        self.bytes_per_s = float("inf")  # of each body
        self.repositories: dict[str, _Repository] = {}
        self._cuts: defaultdict[str, list[int]] = defaultdict(list)
        self._damages: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.port = port
        self._server: _Server | None = None

    def __enter__(self) -> "FakeHub":
        self.down = False
        return self

    def __exit__(self, *_: object) -> None:
        self.down = True

    @property
    def chunk_bytes(self) -> float:
        """A tenth of a second's at most."""
        return min(1 << 16, max(1.0, self.bytes_per_s / 10))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def down(self) -> bool:
        """While true, connections are refused, and bodies on their way end."""
        return self._server is None

    @down.setter
    def down(self, down: bool) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        self._server = None if down else _Server(self, self.port)
        if self._server:
            self.port = self._server.server_port
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, repo: str, files: Files, *, gated: bool = False, private: bool = False, branch: str = "main") -> str:
        """The hash of a commit that has these files alone, the new head of `branch`. A tag is a branch that stays."""
        found = self.repositories.setdefault(repo, _Repository(repo))
        found.gated, found.private = gated, private
        commit = {name: _File(name, content) for name, content in sorted(listed(files).items())}
        text = repr((repo, len(found.commits), [file.entry for file in commit.values()]))
        sha = found.branches[branch] = hashlib.sha1(text.encode()).hexdigest()
        found.commits[sha] = commit
        return sha

    def cut(self, name: str, after_bytes: int, times: int = 1) -> None:
        """The next `times` bodies of this file end after so many bytes."""
        self._cuts[name] += [after_bytes] * times

    def damage(self, name: str, times: int = 1) -> None:
        """The next `times` bodies of this file have other bytes than its published hash."""
        self._damages[name] += times

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of a process that uses this hub, without a token and with a cache of its own."""
        folders = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        return folders | {"HF_ENDPOINT": self.url, "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def fault(self, name: str) -> tuple[float, bool]:
        """Of the next body: after how many bytes it is cut, and whether it is damaged."""
        with self.lock:
            cuts, damaged = self._cuts[name], self._damages[name] > 0
            self._damages[name] -= damaged
            return cuts.pop(0) if cuts else float("inf"), damaged


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        self.status, self.message = status, message
        self.headers = {"X-Error-Code": code, "X-Error-Message": message} | headers


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, hub: FakeHub, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        try:
            self._answer()
        except _Refused as refused:
            self._send_json({"error": refused.message}, refused.status, refused.headers)
        except ConnectionError:
            pass  # the client has gone

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        hub.requests.append((self.command, unquote(url.path), self.headers.get("Range")))
        query = parse_qs(url.query)
        match [unquote(part) for part in url.path.split("/")[1:]]:
            case ["api", "models"]:
                word, owner = (query.get(name, [""])[0].lower() for name in ("search", "author"))
                public = [name for name, repo in hub.repositories.items() if not repo.private]
                found = [name for name in public if word in name.lower() and name.lower().startswith(owner)]
                self._send_json([{"id": name, "tags": []} for name in found])
            case ["api", "models", owner, name] | ["api", "models", owner, name, "revision", _] as parts:
                revision = parts[5] if len(parts) > 4 else "main"
                self._send_json(self._repository(owner, name).model(revision, "blobs" in query))
            case ["api", "models", owner, name, "paths-info", revision]:
                entries = self._repository(owner, name).entries(revision)
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self._send_json([entries[path] for path in form["paths"] if path in entries])
            case ["api", "models", owner, name, "tree", revision, *path]:
                below = "".join(f"{part}/" for part in path)
                entries = self._repository(owner, name).entries(revision)
                inside = [entry for entry in entries.values() if entry["path"].startswith(below)]
                if below and not inside:
                    raise _Refused(404, "EntryNotFound", "Entry not found")
                deep = query["recursive"] == ["true"]
                self._send_json([e for e in inside if deep or "/" not in e["path"].removeprefix(below)])
            case ["cdn", owner, name, sha, *path]:
                self._send_file(hub.repositories[f"{owner}/{name}"].commits[sha]["/".join(path)], {})
            case [owner, name, "resolve", revision, *path]:
                self._resolve(self._repository(owner, name, of_files=True), revision, "/".join(path))
            case _:
                raise _Refused(404, "", "Not found")

    def _repository(self, owner: str, name: str, *, of_files: bool = False) -> _Repository:
        """Without access, a private repository is none, and a gated one has metadata alone."""
        hub, token = self.server.hub, self.headers.get("Authorization", "").removeprefix("Bearer ")
        found, has_access = hub.repositories.get(f"{owner}/{name}"), token in hub.tokens
        if token and not has_access and token not in hub.tokens_without_access:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if found is None or (found.private and not has_access):
            # The hub sends no code with 401; the client takes it for this one, but at https:// addresses alone.
            raise _Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if of_files and found.gated and not has_access:
            message = f"Access to model {found.name} is restricted. Visit {hub.url}/{found.name} to ask for access."
            raise _Refused(403 if token else 401, "GatedRepo", message)
        return found

    def _resolve(self, repo: _Repository, revision: str, path: str) -> None:
        """Files of git come from here. Those of LFS come from a host of another name, to which the client sends no token."""
        sha = repo.sha(revision)
        if (file := repo.commits[sha].get(path)) is None:
            raise _Refused(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        if not file.lfs:
            return self._send_file(file, {"X-Repo-Commit": sha, "ETag": f'"{file.blob_id}"'})
        linked = {"X-Linked-ETag": f'"{file.lfs["lfs"]["sha256"]}"', "X-Linked-Size": str(file.size)}
        location = f"http://localhost:{self.server.hub.port}/cdn/{repo.name}/{sha}/{quote(path)}"
        self._send_head(302, 0, {"X-Repo-Commit": sha, "Location": location} | linked)

    def _send_file(self, file: _File, headers: dict[str, str]) -> None:
        hub, status, start, end = self.server.hub, 200, 0, file.size
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = asked.groups()
            start = int(first) if first else max(0, file.size - int(last))
            end = min(int(last) + 1, file.size) if first and last else file.size
            if start >= end:
                raise _Refused(416, "", "Range not satisfiable", **{"Content-Range": f"bytes */{file.size}"})
            status, headers = 206, headers | {"Content-Range": f"bytes {start}-{end - 1}/{file.size}"}
        self._send_head(status, end - start, headers | {"Accept-Ranges": "bytes"})
        if self.command == "HEAD":
            return
        cut_after, damaged = hub.fault(file.name)
        with opened(file.content) as source:
            source.seek(start)
            stop = min(end, start + cut_after)
            while not hub.down and (chunk := source.read(int(min(stop - source.tell(), hub.chunk_bytes)))):
                with hub.lock:  # before the client has them
                    hub.bytes_served[file.name] += len(chunk)
                self.wfile.write(chunk.translate(INVERTED) if damaged else chunk)
                time.sleep(len(chunk) / hub.bytes_per_s)

    def _send_json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self._send_head(status, len(body), {"Content-Type": "application/json"} | dict(headers or {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, num_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(num_bytes)}).items():
            self.send_header(name, value)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve each folder org/name below FOLDER as a repository of a hub.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    with FakeHub(options.port) as hub, suppress(KeyboardInterrupt):
        for folder in sorted(path for path in options.folder.glob("*/*") if path.is_dir()):
            print(hub.add("/".join(folder.parts[-2:]), folder), folder)
        print(f"HF_ENDPOINT={hub.url}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
