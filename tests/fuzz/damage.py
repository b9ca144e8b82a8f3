"""Damaged checkpoints, params.json and tokenizers, made from the demo model's."""

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.file_worker import DEMO
from tests.support.chat_templates import FAMILIES

PARAMS_FIELDS = ("ffn_dim_multiplier", "rope_theta", "use_scaled_rope", "max_seq_len")
SHARDS = ("consolidated.00.pth", "consolidated.01.pth")
_TAIL_BYTES = 12_000  # where the archive's directory lies


def put_demo(directory: Path) -> None:
    """Copy the undamaged files; a damaged file then replaces one of them."""
    for name in (*SHARDS, "params.json", "tokenizer.model"):
        shutil.copyfile(DEMO / name, directory / name)


def damaged(content: bytes, draw: Random, begin: int = 0, end: int | None = None) -> bytes:
    """`content` with bits flipped, or bytes removed, repeated or random, between `begin` and `end`."""
    data, end = bytearray(content), len(content) if end is None else end
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(begin, max(begin + 1, min(end, len(data))))
        how = draw.random()
        if how < 0.6:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how < 0.7:
            data[at % len(data)] = draw.choice((0, 0xFF, 0x7F, 0x80))
        elif how < 0.8:
            data[at : at + draw.randint(1, 64)] = draw.randbytes(draw.randint(0, 64))
        elif how < 0.9:
            data[at:at] = data[at : at + draw.randint(1, 500)]
        elif len(data) > at > 0:
            del data[at:]
    return bytes(data)


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


VALUES: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e-320, 1e308,
    float("nan"), float("inf"), float("-inf"), "", "256", "x" * 5000, "\ud800", [], [256], {}, {"dim": 256}, 1e-300,
    64, 100_000,
)  # fmt: skip


def damage_params(content: bytes, draw: Random, more: Sequence[str] = PARAMS_FIELDS) -> bytes:
    """Damaged JSON: other bytes, or other values of its fields and of the fields `more`."""
    how = draw.random()
    if how < 0.3:
        return damaged(content, draw)
    if how < 0.4:
        return draw.choice(
            [b"", b"[]", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"\xff\xfe{}", b'{"dim": NaN}',
             b"\xef\xbb\xbf{}", content + b"x", b"{" + content, b"\0" * 100, b'"' + b"x" * 10**6 + b'"']
        )  # fmt: skip
    params = json.loads(content)
    known = [*params, *more]
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice(known) if draw.random() < 0.95 else draw.choice(["", "unknown", "x" * 5000, "\ud800"])
        if draw.random() < 0.15:
            params.pop(name, None)
        else:
            params[name] = draw.choice(VALUES) if draw.random() < 0.8 else draw.randint(-5, 600)
    return json.dumps(params).encode()


_SNIPPETS = (
    *("{% for i in range(9) %}", "{% endfor %}", "{% endif %}", "{% if x %}", "{{", "}}", "{%", "%}", "{#", "|", "('", "')"),
    *("\0", "\ud7ff"),
    *("not ", "{% include '/etc/passwd' %}", "{{ raise_exception(x) }}", "{{ namespace.__init__.__globals__ }}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | map(attribute='__class__') | list }}"),
    *("{% set ns = namespace(a=[1]) %}", "{% generation %}", "{% endgeneration %}", "{% break %}", "{{ '%d' % x }}"),
)  # fmt: skip


def damage_template(source: str, draw: Random) -> bytes:
    """A chat template with flipped bits, with pieces removed, moved or repeated, or with hostile pieces in it."""
    how = draw.random()
    if how < 0.2:
        return damaged(source.encode(), draw)
    if how < 0.23:
        return draw.choice([b"", b"\xff\xfe", draw.randbytes(500), b"{{" * 50_000, b"{% if 1 %}" * 9000, b"a" * 2**21])
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(source) + 1)
        end = min(len(source), at + draw.randint(0, 60))
        move = draw.random()
        if move < 0.5:
            source = source[:at] + draw.choice(_SNIPPETS) + source[end if draw.random() < 0.3 else at :]
        elif move < 0.7:
            source = source[:at] + source[end:]
        else:
            source = source[:at] + source[at:end] * draw.choice((2, 3)) + source[at:]
    return source.encode(errors="replace")


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

    def template(draw: Random) -> tuple[str, bytes, bool]:
        family = draw.choice(list(FAMILIES.values()))
        return "chat_template.jinja", damage_template(family.template, draw), False

    return {
        "template": template,
        "checkpoint": checkpoint,
        "params": lambda draw: ("params.json", damage_params(params, draw), False),
        "tokenizer": lambda draw: ("tokenizer.model", damaged(tokenizer, draw), False),
    }
