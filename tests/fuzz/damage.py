"""Damaged checkpoints, params.json and tokenizers, made from the demo model's, and GGUF files."""

import io
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import gguf

from llama_core.files.gguf.file import GgufFile
from tests.fuzz.file_worker import DEMO
from tests.fuzz.json_damage import damage_json, damaged
from tests.support.gguf_models import write_model

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


# GGUF files: bytes of the header and of the weights, and lengths, counts and offsets that lie

GGUF_NAME = "m.gguf"
_LYING = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


@cache
def _model(encoding: gguf.GGMLQuantizationType) -> tuple[bytes, int]:
    """A small model, and the end of its header."""
    with tempfile.TemporaryDirectory() as name:
        path = write_model(Path(name), encoding=encoding, plain={"tokenizer.ggml.tokens": ["a", "b"] * 48})
        begin = min(tensor.offset for tensor in GgufFile(path).tensors.values())
        return path.read_bytes(), begin


def _lie(content: bytes, header: int, draw: Random) -> bytes:
    """Numbers of 4 or 8 bytes in the header become others."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2))):
        number = draw.choice(_LYING)
        if draw.random() < 0.5:
            struct.pack_into("<Q", data, draw.randrange(8, header - 8), number)
        else:
            struct.pack_into("<I", data, draw.randrange(4, header - 8), number % 2**32)
    return bytes(data)


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

    def gguf_model(draw: Random) -> tuple[str, bytes, bool]:
        kinds = gguf.GGMLQuantizationType
        content, header = _model(draw.choice([kinds.F32, kinds.F16, kinds.Q8_0, kinds.Q4_1, kinds.Q6_K]))
        how = draw.random()
        if how < 0.4:
            return GGUF_NAME, damaged(content, draw, 0, header), True
        if how < 0.7:
            return GGUF_NAME, _lie(content, header, draw), True
        if how < 0.8:
            return GGUF_NAME, content[: draw.randrange(len(content))], True
        if how < 0.85:
            return GGUF_NAME, draw.choice([b"", b"GGUF", content * 2, draw.randbytes(2000), content[:header]]), True
        return GGUF_NAME, damaged(content, draw), True

    return {
        "checkpoint": checkpoint,
        "gguf": gguf_model,
        "params": lambda draw: ("params.json", damage_json(params, draw, PARAMS_FIELDS), False),
        "tokenizer": lambda draw: ("tokenizer.model", damaged(tokenizer, draw), False),
    }
