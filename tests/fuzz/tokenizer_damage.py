"""Damaged tokenizers: tokenizer.json and the files beside it, Meta's tiktoken file, and vocabularies inside GGUF files."""

import base64
import json
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.damage import VALUES, Damage, damaged
from tests.support.gguf_vocabularies import byte_level_fields, sentencepiece_fields, write_vocabulary
from tests.support.vocabularies import FAMILIES, make_family, precompiled, write_folder, write_tiktoken

KINDS = ("tokenizer_json", "gguf_vocabulary")
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_CONTROL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_STRANGE: tuple[Any, ...] = (
    *VALUES,
    *("a", "ab", " ", "\0", "<s>", "Ġ", "▁", [["a", "b"]], [[]], {"type": "Unknown"}, -5),
)
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
        write_folder(root / "precompiled", *precompiled(_TABLE))
        write_tiktoken(root / "tiktoken" / "tokenizer.model")
        for name, fields in _vocabularies().items():
            (root / name).mkdir()
            write_vocabulary(root / name / "m.gguf", **fields)
        return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


# A normalization table of SentencePiece: characters and what becomes of them, in hexadecimal.
_TABLE = "C5\t41 30A\nFB01\t66 69\nFF21\t41\n2460\t31\n3000\t20\n212B\t41 30A\n"


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
        if draw.random() < 0.2:
            return name, _damage_bytes(content, draw), False
        return name, _damage_json(content, draw, name.endswith("/tokenizer.json")), False

    def gguf_vocabulary(draw: Random) -> tuple[str, bytes, bool]:
        name = draw.choice(models)
        if draw.random() < 0.3:
            return name, _damage_bytes(files()[name], draw), False
        return name, _damage_vocabulary(_vocabularies()[name.partition("/")[0]], draw), False

    return {"tokenizer_json": tokenizer_json, "gguf_vocabulary": gguf_vocabulary}


def _damage_bytes(content: bytes, draw: Random) -> bytes:
    how = draw.random()
    if how < 0.25:
        return content[: draw.randrange(len(content))]
    if how < 0.4:
        strange = [b"", b"[]", b"null", b"[" * 10**5, b'{"model":' * 10**5, b"9" * 6000, b"\xff\xfe{}", b"\0" * 100]
        return draw.choice([*strange, content + content, draw.randbytes(500)])
    return damaged(content, draw)


def _damage_lines(content: bytes, draw: Random) -> bytes:
    """Other tokens and ranks in a tiktoken file."""
    if draw.random() < 0.4:
        return _damage_bytes(content, draw)
    lines = content.splitlines()
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(lines))
        token = base64.b64encode(draw.choice((b"", b"a", b"\xff" * 5000, draw.randbytes(3))))
        rank = draw.choice((b"-1", b"1e9", b"9" * 400, b"", b"%d" % at, b"0x1"))
        line = draw.choice((token + b" %d" % at, lines[at].split(b" ")[0] + b" " + rank, lines[at - 1], b"=== 1", b" "))
        lines[at : at + draw.randrange(3)] = [line] * draw.choice((1, 1, 2))
    return b"\n".join(lines)


def _damage_json(content: bytes, draw: Random, is_main: bool) -> bytes:
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if is_main and draw.random() < 0.75:
            draw.choice(_MOVES)(value, draw)
        else:
            _change_any(value, draw)
    text = json.dumps(value)
    if draw.random() < 0.05:  # a field twice: the last one counts in Python, and is refused elsewhere
        field = draw.choice(list(value) or ["a"])
        text = text[:-1] + f", {json.dumps(field)}: {json.dumps(draw.choice(_STRANGE))}}}"
    return text.encode()


def _change_any(value: Any, draw: Random) -> None:
    """A field or an element anywhere is removed, replaced or repeated."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(value[key], dict | list) or draw.random() < 0.25:
            break
        value = value[key]
    how = draw.random()
    if how < 0.25:
        del value[key]
    elif how < 0.8 or not isinstance(value, list):
        value[key] = deepcopy(draw.choice(_STRANGE))  # which later changes must not reach
    else:
        value.append(value[key])


def _vocab(value: Any, draw: Random) -> None:
    vocab = value.get("model", {}).get("vocab") if isinstance(value.get("model"), dict) else None
    if isinstance(vocab, dict) and vocab:
        token, other = draw.choice(list(vocab)), draw.choice(list(vocab))
        number = draw.choice((-1, 2**24, 2**31, 2**32, 2**63, 10**30, 1.5, len(vocab), vocab[other], None, "1"))
        if draw.random() < 0.6:
            vocab[token] = number
        else:
            vocab[draw.choice(("", "\0", " ", "\ud800", _LARGE, "日本", "<s>"))] = draw.choice(
                (vocab.pop(token), number)
            )
    elif isinstance(vocab, list) and vocab:
        entry = draw.choice(
            (["a", -1], ["", 0.0], ["x", 1e39], ["\ud800", -1], [_LARGE, -1.0], [], ["a"], ["b", 10**400])
        )
        vocab[draw.randrange(len(vocab))] = entry


def _merges(value: Any, draw: Random) -> None:
    merges = value.get("model", {}).get("merges") if isinstance(value.get("model"), dict) else None
    if not isinstance(merges, list) or not merges:
        return
    at = draw.randrange(len(merges))
    strange = [
        "a b",
        "unknown token",
        ["unknown", "token"],
        ["", ""],
        " ",
        "a",
        ["a"],
        ["a", "b", "c"],
        None,
        merges[at - 1],
    ]
    merges.insert(at, draw.choice(strange))
    if draw.random() < 0.2:
        draw.shuffle(merges)


def _added(value: Any, draw: Random) -> None:
    added = value.get("added_tokens")
    if not isinstance(added, list):
        return
    token = {name: draw.random() < 0.3 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    contents = ("a", " ", "\n", "\0", "the", "é", "\ud800", "", _LARGE, "▁", "<0x0A>", "Ġ", "A\u030a", "<s>")
    number = draw.choice((0, 1, 5, -1, 2**24 - 1, 2**31, 2**32, 10**30, 700 + len(added), len(added) + 400))
    if draw.random() < 0.1:
        first = draw.choice((400, 700, 703, 705))
        is_special = draw.choice(([False], [True], [True, False]))
        many = [token | {"id": first + i, "content": f"<{i}>", "special": is_special[i % len(is_special)]}
                for i in range(draw.choice((2_000, 20_000, 100_000)))]  # fmt: skip
        added += many
    elif added and draw.random() < 0.5 and isinstance(added[-1], dict):
        added[draw.randrange(len(added))] = added[-1] | draw.choice(
            (token, {"id": number}, {"content": draw.choice(contents)})
        )
    else:
        added.append(token | {"id": number, "content": draw.choice(contents)})


def _pattern(draw: Random) -> Any:
    if draw.random() < 0.2:
        return {"String": draw.choice(("", "a", " ", _LARGE, "\ud800"))}
    return {"Regex": draw.choice(_REGEXES)}


def _pre_tokenizer(value: Any, draw: Random) -> None:
    behavior = draw.choice(("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous", "unknown"))
    step = draw.choice((
        {"type": "Split", "pattern": _pattern(draw), "behavior": behavior, "invert": draw.random() < 0.3},
        {"type": "Split", "pattern": _pattern(draw), "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": draw.choice(("▁", "", "ab", "a")), "prepend_scheme": "always", "split": True},
        {"type": "Digits", "individual_digits": True}, {"type": "Unknown"}, {"type": "UnicodeScripts"}, None,
        {"type": "CharDelimiterSplit", "delimiter": draw.choice(("a", "", "ab"))},
        {"type": "FixedLength", "length": draw.choice((0, 1, -1, 2**64))},
    ))  # fmt: skip
    _put(value, "pre_tokenizer", "pretokenizers", step, draw)


def _normalizer(value: Any, draw: Random) -> None:
    content = draw.choice(("", "x", "aa", "a" * 60, _LARGE, "\ud800", "▁"))
    step = draw.choice((
        {"type": "Replace", "pattern": _pattern(draw), "content": content},
        {"type": "Replace", "pattern": {"String": draw.choice(("", "a", "e"))}, "content": content},
        {"type": "Prepend", "prepend": content}, {"type": "Unknown"}, {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Lowercase"}, {"type": "ByteLevel"},
        {"type": "Precompiled", "precompiled_charsmap": _charsmap(draw)}, {"type": "Nmt"},
        {"type": "Precompiled", "precompiled_charsmap": _charsmap(draw)},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 64},
    ))  # fmt: skip
    _put(value, "normalizer", "normalizers", step, draw)


def _put(value: Any, field: str, plural: str, step: Any, draw: Random) -> None:
    """Make `step` the field, or a member of its sequence, or put it below many sequences."""
    old = value.get(field)
    how = draw.random()
    if how < 0.4:
        step = {"type": "Sequence", plural: draw.sample([step, *([old] if old else [])], k=2 if old else 1)}
    elif how < 0.5:
        for _ in range(draw.choice((2, 30, 150))):
            step = {"type": "Sequence", plural: [step]}
    value[field] = step


@cache
def _undamaged_charsmap() -> bytes:
    content = json.loads(files()["precompiled/tokenizer.json"])
    return base64.b64decode(content["normalizer"]["normalizers"][0]["precompiled_charsmap"])


def _charsmap(draw: Random) -> str:
    content = _undamaged_charsmap()
    how = draw.random()
    if how < 0.1:
        return draw.choice(("", "====", "AAAA", "é", "//////8=", base64.b64encode(draw.randbytes(2000)).decode()))
    if how < 0.3:
        content = content[: draw.randrange(len(content))]
    elif how < 0.5:
        size = int.from_bytes(content[:4], "little")
        content = draw.choice((0, size - 4, size + 4, 2**31, 2**32 - 1, 3)).to_bytes(4, "little") + content[4:]
    elif how < 0.6:
        content = content.rstrip(b"\0") + b"x" * 10**6
    else:
        content = damaged(content, draw)
    return base64.b64encode(content).decode()


def _decoder(value: Any, draw: Random) -> None:
    replace = {"type": "Replace", "pattern": _pattern(draw), "content": _LARGE}
    kinds = ({"type": "Unknown"}, {"type": "CTC"}, {"type": "ByteLevel"}, {"type": "Metaspace", "replacement": "▁"},
             {"type": "WordPiece", "prefix": "##", "cleanup": True}, replace, {"type": "ByteFallback"}, {"type": "Fuse"},
             {"type": "Strip", "content": " ", "start": 2**40, "stop": -1}, None)  # fmt: skip
    _put(value, "decoder", "decoders", draw.choice(kinds), draw)


def _post_processor(value: Any, draw: Random) -> None:
    pieces = [
        {"SpecialToken": {"id": draw.choice(("<s>", "none")), "type_id": draw.choice((0, -1, 2**40))}}
    ] * draw.choice((1, 9999))
    told = {"<s>": {"id": "<s>", "ids": [draw.choice((1, 10**6, -1))] * draw.choice((0, 1, 10**5)), "tokens": ["<s>"]}}
    value["post_processor"] = draw.choice((
        {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": told}, {"type": "Unknown"},
        {"type": "BertProcessing", "sep": ["a", 10**9], "cls": ["b", 0]}, {"type": "TemplateProcessing"},
        {"type": "Sequence", "processors": []},
    ))  # fmt: skip


def _model(value: Any, draw: Random) -> None:
    if isinstance(model := value.get("model"), dict):
        name = draw.choice(
            (*model, "dropout", "byte_fallback", "unk_id", "unk_token", "fuse_unk", "ignore_merges", "type")
        )
        model[name] = deepcopy(draw.choice((*_STRANGE, True, False, 0.5, "BPE", "Unigram", "WordPiece")))


_MOVES: tuple[Callable[[Any, Random], None], ...] = (
    *(_vocab, _merges, _added, _pre_tokenizer, _pre_tokenizer, _normalizer, _normalizer, _decoder, _post_processor, _model),
)  # fmt: skip


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
    elements = _ELEMENTS.get(name, (0,))
    for _ in range(draw.choice((1, 1, 5, 200))):
        if not values:
            break
        at, other = draw.randrange(len(values)), draw.randrange(len(values))
        match draw.randrange(4):
            case 0:
                values[at] = draw.choice(elements)
            case 1:
                values[at], values[other] = values[other], values[at]
            case 2:
                values[at] = values[other]
            case _ if draw.random() < 0.3:
                values = draw.choice((values[:-1], values[: at + 1], values * 2, [*values, *elements[:1]]))
            case _:
                values[at] = draw.choice(elements)
    return values
