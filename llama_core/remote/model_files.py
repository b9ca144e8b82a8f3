"""The files of a remote model: which of those that a store lists are read, and a record of them. Reads nothing."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from llama_core.errors import FetchError
from llama_core.files.adapter import CONFIG as ADAPTER_CONFIG
from llama_core.files.adapter import WEIGHTS as ADAPTER_WEIGHTS
from llama_core.files.gguf.model import SUFFIX, GgufModel, is_later_part
from llama_core.files.hf.files import INDEX, SINGLE, is_weights_file
from llama_core.files.sentence_transformers import FILES as EMBEDDING_FILES
from llama_core.remote.names import HUB, RemoteName
from llama_core.text.template.files import TEMPLATE_FILES
from llama_core.text.tokenizers.files import SIDE_FILES

Kind = Literal["model", "tokenizer", "adapter"]
Read = Callable[[str], bytes]

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
_TEXT_FILES: Final = frozenset((*_TOKENIZERS, *SIDE_FILES, *TEMPLATE_FILES, *EMBEDDING_FILES))
_DEFAULT_PART: Final = "Q4_K_M"  # llama.cpp's default too
_SAFETENSORS: Final = ".safetensors"
_MAX_TEXT_BYTES: Final = 100_000_000
_SHOWN_PARTS: Final = 12


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """name: below the model's folder, with slashes. size: in bytes. sha256: "" where the store publishes none."""

    name: str
    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The files that are read of a pinned model, tokenizer or adapter. asked: the name that was pinned."""

    name: RemoteName
    kind: Kind
    asked: RemoteName
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def chosen_files(asked: RemoteName, revision: str, kind: Kind, listed: Sequence[RemoteFile], read: Read) -> RemoteModel:
    """The files that a model, a tokenizer or an adapter needs, of those `listed`. Copies in other formats are left out.

    read: the content of a small file. Raises FetchError that says what is missing.
    """
    name = asked.pinned(revision)
    files = {file.name: file for file in listed if _is_below(file.name)}
    wanted, main = _wanted(name, kind, files, read)
    if missing := [each for each in wanted if each not in files]:
        raise FetchError(f"{name}: has no {missing[0]}", param="ckpt_dir")
    for each in wanted:
        if not each.endswith((SUFFIX, _SAFETENSORS)) and files[each].size > _MAX_TEXT_BYTES:
            raise FetchError(f"{name}: {each} has {files[each].size} bytes, more than {_MAX_TEXT_BYTES}")
    pinned = replace(name, part=main) if name.scheme == HUB else name
    return RemoteModel(pinned, kind, asked, tuple(files[each] for each in wanted))


def _is_below(name: str) -> bool:
    """Whether a name that a store tells is that of a file in the model's folder."""
    return name.isprintable() and not name.startswith("/") and ".." not in Path(name).parts


def _wanted(name: RemoteName, kind: Kind, files: Mapping[str, RemoteFile], read: Read) -> tuple[list[str], str]:
    if kind == "adapter":
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS], ""
    texts = sorted(files.keys() & _TEXT_FILES)
    if kind == "tokenizer" and not files.keys().isdisjoint(_TOKENIZERS):
        return texts, ""
    ggufs = sorted(each for each in files if each.endswith(SUFFIX) and "mmproj" not in each.lower())
    if name.part or (ggufs and not any(map(is_weights_file, files))):
        main = _gguf_file(name, ggufs)
        return [part.as_posix() for part in GgufModel(Path(main)).files], main
    if INDEX in files:
        return [*texts, INDEX, *_shards(read(INDEX))], ""
    if SINGLE in files:
        return [*texts, SINGLE], ""
    others = sorted({each.rpartition(".")[2] for each in files if each.endswith((".bin", ".pth", ".pt", ".onnx"))})
    what = f"only .{', .'.join(others)}, which are not read" if others else f"neither {SINGLE} nor a GGUF file"
    raise FetchError(f"{name}: has {what}: take a repository with safetensors or GGUF files", param="ckpt_dir")


def _shards(index: bytes) -> list[str]:
    """The files that an index names. What is wrong with an index, its reader says."""
    try:
        names = set(json.loads(index)["weight_map"].values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []
    return sorted(name for name in names if isinstance(name, str) and "/" not in name and is_weights_file(name))


def _gguf_file(name: RemoteName, ggufs: Sequence[str]) -> str:
    """The first part of the file that `name.part` means: a file's name, or the end of one, such as Q4_K_M."""
    firsts = [each for each in ggufs if not is_later_part(Path(each).name)]
    if name.part in firsts:
        return name.part
    if not name.part and len(firsts) == 1:
        return firsts[0]
    part = (name.part or _DEFAULT_PART).lower()
    ends = {each: re.sub(r"-00001-of-\d{5}$", "", each.removesuffix(SUFFIX)).lower() for each in firsts}
    matches = [each for each, end in ends.items() if end == part or end.endswith(("-" + part, "." + part, "/" + part))]
    plain = [each for each in matches if not ends[each].endswith("ud-" + part)]  # Unsloth's UD-Q4_K_M beside Q4_K_M
    if len(found := plain or matches) == 1:
        return found[0]
    shown = ", ".join((found or firsts)[:_SHOWN_PARTS]) or "none"
    what = "several GGUF files" if not name.part else f"{len(found) or 'no'} GGUF files for {name.part}"
    raise FetchError(f"{name}: has {what}: name one of {shown}", param="ckpt_dir")
