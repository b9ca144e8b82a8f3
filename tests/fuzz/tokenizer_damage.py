"""Damaged tokenizers: tokenizer.json and the files beside it, Meta's tiktoken file, and vocabularies inside GGUF files."""

import base64
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.damage import Damage
from tests.fuzz.json_damage import damage_json, damaged
from tests.support.gguf_models import byte_level_fields, sentencepiece_fields, write_vocabulary
from tests.support.vocabularies import FAMILIES, make_family, write_tiktoken

KINDS = ("tokenizer_json", "gguf_vocabulary")
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_REGEXES = (
    *("(a+)+$", "(a|a)*b", "(a|aa)+$", "(x+x+)+y", "(.*)*", "(a?){50}a{50}", "a?" * 40 + "a" * 40, r"(\s+)+x", "a*a*a*a*b"),
    *("(", ")", "[", "[z-a]", "a{99999}", "(a{999}){999}", "((a{99}){99}){99}", "(" * 5000, "(" * 900 + ")" * 900, "a**", "*"),
    *(r"\p{Nothing}", r"\1", r"(?<a>x)\k<b>", "(?<=a+)b", r"(?R)", r"\g<0>", "", "^", "$", "|", "a*", "(?=a)", r"\b", "\\"),
    *("x" * 10**6, "[" * 10**5, "(?i:" * 2000, "[" + "a-z" * 9000 + "]", r"(?:\s*)*$", r"\s*\s*\s*x", ".*.*.*=", r"(\w+\s?)*$"),
)  # fmt: skip
_LARGE = "ab" * 500_000


@cache
def files() -> Mapping[str, bytes]:
    """The undamaged files, by their paths: a folder for each tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for family in FAMILIES:
            make_family(family, root / family)
            (root / family / "special_tokens_map.json").write_text("{}")
        for family in ("llama3", "metaspace", "unigram"):
            names = json.loads((root / family / "tokenizer_config.json").read_text())
            told = {key: value for key, value in names.items() if key.endswith("_token") and isinstance(value, str)}
            (root / family / "special_tokens_map.json").write_text(json.dumps(told))
        write_tiktoken(root / "tiktoken" / "tokenizer.model")
        for name, fields in _vocabularies().items():
            (root / name).mkdir()
            write_vocabulary(root / name / "m.gguf", **fields)
        return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@cache
def _vocabularies() -> Mapping[str, dict[str, Any]]:
    """Keys of GGUF files, by folder."""
    return {"gguf_" + family: byte_level_fields(family) for family in ("llama3", "qwen", "smollm")} | {
        "gguf_sentencepiece": sentencepiece_fields()
    }


def put_folders(directory: Path) -> None:
    """Write the undamaged folders below `directory`."""
    for name, content in files().items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def damages() -> dict[str, Damage]:
    """As `damage.damages`; names have the folder before them."""
    main = sorted(name for name in files() if name.endswith("/tokenizer.json"))
    side = sorted(name for name in files() if name.endswith(_SIDE_FILES))
    models = sorted(name for name in files() if name.endswith(".gguf"))

    def tokenizer_json(draw: Random) -> tuple[str, bytes, bool]:
        how = draw.random()
        if how < 0.08:
            name = "tiktoken/tokenizer.model"
            return name, _damage_lines(files()[name], draw), False
        name = draw.choice(side if how < 0.25 else main)
        content = files()[name]
        if name.endswith(_SIDE_FILES) or draw.random() < 0.8:
            return name, damage_json(content, draw), False
        value = json.loads(content)
        _change_steps(value, draw)
        return name, json.dumps(value).encode(), False

    def gguf_vocabulary(draw: Random) -> tuple[str, bytes, bool]:
        name = draw.choice(models)
        if draw.random() < 0.3:
            return name, damaged(files()[name], draw), False
        return name, _damage_vocabulary(_vocabularies()[name.partition("/")[0]], draw), False

    return {"tokenizer_json": tokenizer_json, "gguf_vocabulary": gguf_vocabulary}


def _damage_lines(content: bytes, draw: Random) -> bytes:
    """Other tokens and ranks in a tiktoken file."""
    if draw.random() < 0.4:
        return damaged(content, draw)
    lines = content.splitlines()
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(lines))
        token = base64.b64encode(draw.choice((b"", b"a", b"\xff" * 5000, draw.randbytes(3))))
        rank = draw.choice((b"-1", b"1e9", b"9" * 400, b"", b"%d" % at, b"0x1"))
        line = draw.choice((token + b" %d" % at, lines[at].split(b" ")[0] + b" " + rank, lines[at - 1], b"=== 1", b" "))
        lines[at : at + draw.randrange(3)] = [line] * draw.choice((1, 1, 2))
    return b"\n".join(lines)


def _pattern(draw: Random) -> Any:
    if draw.random() < 0.2:
        return {"String": draw.choice(("", "a", " ", _LARGE, "\ud800"))}
    return {"Regex": draw.choice(_REGEXES)}


def _change_steps(value: Any, draw: Random) -> None:
    """Make a step the field, or a member of its sequence, or put it below many sequences."""
    content = draw.choice(("", "x", "aa", "a" * 60, _LARGE, "\ud800", "▁"))
    behavior = draw.choice(("Isolated", "Isolated", "Removed", "MergedWithPrevious", "Contiguous", "unknown"))
    replace = {"type": "Replace", "pattern": _pattern(draw), "content": content}
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    names = ("Unknown", "UnicodeScripts", "NFKD", "ByteLevel", "Nmt", "CTC", "ByteFallback", "Fuse")
    steps: dict[str, tuple[str, list[Any]]] = {
        "pre_tokenizer": ("pretokenizers", [
            *[{"type": "Split", "pattern": _pattern(draw), "behavior": behavior, "invert": draw.random() < 0.2}] * 6,
            {"type": "Metaspace", "replacement": draw.choice(("▁", "", "ab")), "prepend_scheme": "always"},
            {"type": "Digits", "individual_digits": True}, {"type": "FixedLength", "length": draw.choice((0, 1, -1, 2**64))},
        ]),
        "normalizer": ("normalizers", [
            *[replace] * 3, {"type": "Prepend", "prepend": content}, {"type": "Sequence", "normalizers": [twice] * 64},
            {"type": "Precompiled", "precompiled_charsmap": draw.choice(("", "====", "//////8=", "é"))},
        ]),
        "decoder": ("decoders", [*[replace] * 2, {"type": "Strip", "content": " ", "start": 2**40, "stop": -1}]),
    }  # fmt: skip
    field = draw.choice(list(steps))
    plural, made = steps[field]
    step, old, how = draw.choice([*made, *({"type": name} for name in names), None]), value.get(field), draw.random()
    if how < 0.4:
        step = {"type": "Sequence", plural: draw.sample([step, *([old] if old else [])], k=2 if old else 1)}
    elif how < 0.5:
        for _ in range(draw.choice((2, 30, 150))):
            step = {"type": "Sequence", plural: [step]}
    value[field] = step


def _damage_vocabulary(undamaged: Mapping[str, Any], draw: Random) -> bytes:
    """A GGUF file whose keys lie: other arrays of tokens, types, scores and merges, other special ids."""
    fields = dict(undamaged)
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice(list(fields))
        value = fields[name]
        how = draw.random()
        if how < 0.12 and name != "tokens":
            del fields[name]
        elif isinstance(value, list) and value:
            fields[name] = _damage_array(list(value), name, draw)
        elif name.endswith("_id"):
            fields[name] = draw.choice((0, 1, 5, len(fields.get("tokens", ())), 2**31, 2**32 - 1, True, "1", [1]))
        else:
            fields[name] = draw.choice(
                (True, False, 3, "x" * 5000, "", "gpt2", "llama", "bert", "default", "qwen2", ["a"])
            )
    with tempfile.TemporaryDirectory() as name:
        return write_vocabulary(Path(name) / "m.gguf", **fields).read_bytes()


_ELEMENTS: Mapping[str, tuple[Any, ...]] = {
    "tokens": ("", "a", "\0", "▁", "<0x0A>", "<0xZZ>", "<s>", "</s>", "Ġ", "日本", "x" * 10**6, " ", "<|im_end|>"),
    "token_type": (0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1),
    "scores": (0.0, -1.0, 1e38, float("nan"), float("inf"), float("-inf")),
    "merges": ("a b", "", " ", "a", "unknown token", "a b c", "\0 \0", "  ", "x" * 10**6 + " y"),
}


def _damage_array(values: list[Any], name: str, draw: Random) -> list[Any]:
    for _ in range(draw.choice((1, 1, 5, 200))):
        at = draw.randrange(len(values))
        values[at] = draw.choice((*_ELEMENTS.get(name, (0,)), values[draw.randrange(len(values))]))
    return draw.choice((values, values, values[:-1], values[: at + 1], values * 2))
