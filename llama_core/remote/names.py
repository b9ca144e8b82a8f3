"""Names of models that lie in a hub, in an object store or on a web server.

    org/name                      of a hub; hf://org/name, or the page's URL, says so where a folder has that name
    org/name@revision             a branch, a tag or a commit
    org/name:Q4_K_M               of several GGUF files, the one with this encoding or file name
    s3://bucket/folder            also gs:// and https://, a folder or a .gguf file

A pinned name has the commit of a hub's repository, or after "#" the digest of what a store has listed.
"""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from typing import Final

HUB: Final = "hf"
_HUB_NAME: Final = re.compile(
    r"(?P<scheme>hf://|https://huggingface\.co/)?(?P<path>\w[\w.-]*/\w[\w.-]*)"
    r"(@(?P<revision>[\w./-]+))?(:(?P<part>[\w./ +-]+))?",
    re.ASCII,
)
_URL: Final = re.compile(r"(?P<scheme>s3|gs|https?)://(?P<path>[^\s#]+?)/?(#(?P<revision>[0-9a-f]{16}))?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteName:
    """scheme: HUB or that of a URL. revision: "" for a hub's default branch, and for a URL that is not pinned. part: the GGUF
    file of a hub's repository."""

    scheme: str
    path: str
    revision: str = ""
    part: str = ""

    def __str__(self) -> str:
        if self.scheme == HUB:
            return f"hf://{self.path}" + f"@{self.revision}" * bool(self.revision) + f":{self.part}" * bool(self.part)
        return self.url + f"#{self.revision}" * bool(self.revision)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.path}"

    @property
    def is_pinned(self) -> bool:
        return bool(self.revision) and (self.scheme != HUB or _COMMIT.fullmatch(self.revision) is not None)

    @property
    def model_id(self) -> str:
        """The last part, without what every such name has."""
        last = self.path.rpartition("/")[2]
        return last.removesuffix(".gguf").removesuffix("-GGUF")

    @property
    def file_name(self) -> str:
        """Another one for every name."""
        plain = re.sub(r"[^\w.-]+", "--", self.path)
        return f"{plain[-100:]}-{hashlib.sha256(str(self).encode()).hexdigest()[:12]}"

    @property
    def main(self) -> str:
        """Of a pinned name, the GGUF file below its folder; "" where the folder is the model."""
        return self.path.rpartition("/")[2] if self.path.endswith(".gguf") else self.part

    def pinned(self, revision: str) -> "RemoteName":
        return replace(self, revision=revision)


def remote_name(text: str) -> RemoteName | None:
    """None for a local path: one that exists, or has not the form of a name."""
    if (match := _HUB_NAME.fullmatch(text)) is not None:
        if not match["scheme"] and (match["path"].endswith(".gguf") or os.path.exists(text)):
            return None
        return RemoteName(HUB, match["path"], match["revision"] or "", match["part"] or "")
    match = _URL.fullmatch(text)
    return None if match is None else RemoteName(match["scheme"], match["path"], match["revision"] or "")
