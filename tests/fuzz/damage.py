"""Damaged checkpoints, params.json and tokenizers, made from the demo model's."""

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.file_worker import DEMO
from tests.fuzz.json_damage import damage_json, damaged

PARAMS_FIELDS = ("ffn_dim_multiplier", "rope_theta", "use_scaled_rope", "max_seq_len")
SHARDS = ("consolidated.00.pth", "consolidated.01.pth")
_TAIL_BYTES = 12_000  # where the archive's directory lies


def put_demo(directory: Path) -> None:
    """Copy the undamaged files; a damaged file then replaces one of them."""
    for name in (*SHARDS, "params.json", "tokenizer.model"):
        shutil.copyfile(DEMO / name, directory / name)


class Archive:
    """A parsed shard: the place of its pickle, and the parts needed to write the shard again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.content = (DEMO / name).read_bytes()
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            self.records = [(info.filename, archive.read(info)) for info in archive.infolist()]
        self.pickle = next(data for filename, data in self.records if filename.endswith("/data.pkl"))
        self.pickle_at = self.content.index(self.pickle)

    def with_pickle(self, data: bytes) -> bytes:
        """The shard with another pickle before the same weights, and checksums that match."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for filename, content in self.records:
                archive.writestr(filename, data if filename.endswith("/data.pkl") else content)
        return buffer.getvalue()


def damage_checkpoint(archive: Archive, draw: Random) -> tuple[bytes, bool]:
    """A damaged shard's content, and whether its checksums were recomputed."""
    how = draw.random()
    size, pickle_end = len(archive.content), archive.pickle_at + len(archive.pickle)
    if how < 0.25:
        return damaged(archive.content, draw), False
    if how < 0.4:
        return damaged(archive.content, draw, size - _TAIL_BYTES, size), False
    if how < 0.5:
        return damaged(archive.content, draw, archive.pickle_at, pickle_end), False
    if how < 0.55:
        return archive.content[: draw.randrange(size)], False
    if how < 0.6:
        return draw.choice([b"", b"PK\x03\x04", b"\x80\x02}.", draw.randbytes(2000), archive.content * 2]), False
    if how < 0.9:
        return archive.with_pickle(damaged(archive.pickle, draw)), True
    hostile = hostile_pickle(draw)
    return (archive.with_pickle(hostile), True) if draw.random() < 0.8 else (hostile, True)


class _Calls:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: object, arguments: tuple[object, ...]) -> None:
        self._what = (function, arguments)

    def __reduce__(self) -> Any:
        return self._what


def hostile_pickle(draw: Random) -> bytes:
    """A pickle that calls a forbidden function, given by name, so that this module imports none of them."""
    module, name, argument = draw.choice(
        [("os", "system", "touch sprung"), ("posix", "mkdir", "sprung"), ("builtins", "eval", "1"), ("builtins", "exec", "x=1"),
         ("subprocess", "Popen", "true"), ("builtins", "getattr", "x"), ("builtins", "__import__", "this"),
         ("torch", "load", "x"), ("torch.hub", "load", "x"), ("shutil", "rmtree", "sprung"), ("socket", "create_server", "x"),
         ("torch._utils", "_rebuild_tensor_v2", "x"), ("collections", "OrderedDict", "x"), ("torch", "ByteStorage", "x"),
         ("torch.storage", "_load_from_bytes", "x"), ("numpy", "fromfile", "x"), ("pathlib", "Path.unlink", "sprung")]
    )  # fmt: skip
    if draw.random() < 0.2:
        return pickle.dumps({"norm.weight": _Calls(open, ("sprung", "w"))})
    call = f"c{module}\n{name}\n".encode() + b"X" + len(argument).to_bytes(4, "little") + argument.encode() + b"\x85R"
    return b"\x80\x02" + draw.choice([call, b"}X\x01\0\0\0a" + call + b"s", call * 3]) + b"."


Damage = Callable[[Random], tuple[str, bytes, bool]]


def damages() -> dict[str, Damage]:
    """By kind: a function that gives a file's name, its content, and whether its checksums were recomputed."""
    archives = [Archive(name) for name in SHARDS]
    params, tokenizer = (DEMO / "params.json").read_bytes(), (DEMO / "tokenizer.model").read_bytes()

    def checkpoint(draw: Random) -> tuple[str, bytes, bool]:
        archive = draw.choice(archives)
        content, is_rewritten = damage_checkpoint(archive, draw)
        # Sometimes under the other shard's name.
        name = archive.name if draw.random() < 0.97 else draw.choice(SHARDS)
        return name, content, is_rewritten

    return {
        "checkpoint": checkpoint,
        "params": lambda draw: ("params.json", damage_json(params, draw, PARAMS_FIELDS), False),
        "tokenizer": lambda draw: ("tokenizer.model", damaged(tokenizer, draw), False),
    }
