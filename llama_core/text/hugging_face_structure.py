"""Which tokenizer.json files are sound and supported, before the `tokenizers` library reads them.

The library panics on some damaged files, fills in defaults for others, and decodes in ways that a stream cannot follow. This
module refuses those by the name of the field.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from llama_core.text.byte_level import BYTE_OF_CHAR, bytes_of, has_every_byte
from llama_core.text.sentencepiece_tokenizer import SPACE_SYMBOL
from llama_core.text.tokenizer import ByteDecoding, LeadingSpace

MAX_IDS: Final = 2**24
MAX_ADDED: Final = 2**14  # the library's search for them, and the server's, grow with their number
_MAX_TOKEN_CHARS: Final = 2048  # the library recurses once for each character of a Unigram token
_BYTE_NAME: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE_REPLACE: Final = {"type": "Replace", "pattern": {"String": SPACE_SYMBOL}, "content": " "}
_STRIP_ONE: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Decoding(NamedTuple):
    """How the ids of a tokenizer.json become text."""

    byte_decoding: ByteDecoding
    leading_space: LeadingSpace = "keep"
    has_byte_names: bool = False  # tokens like <0x0A> are bytes
    has_every_byte: bool = False  # so that no character is unknown

    def raw(self, token: str) -> bytes:
        """The bytes that a token adds to a text that has begun."""
        if self.byte_decoding == "byte_level":
            raw = bytes_of(token)
            return token.encode() if raw is None else raw
        if self.has_byte_names and _BYTE_NAME.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_SYMBOL, " ").encode()


def check_structure(content: Mapping[str, Any]) -> Decoding:
    """How the tokenizer decodes. Raises ValueError that names the field at fault or not supported."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError("model must be an object")
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"model.type is {str(kind)[:40]!r}: only BPE and Unigram are supported")
    tokens = _check_bpe(model) if kind == "BPE" else _check_unigram(model)
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_CHARS:
        raise ValueError(f"model.vocab has a token of {longest} characters, more than {_MAX_TOKEN_CHARS}")
    _check_added(content.get("added_tokens"), len(tokens))
    decoding = _decoding(content.get("decoder"))
    known = set(tokens)
    if decoding.byte_decoding == "byte_level":
        added = {token["content"] for token in content.get("added_tokens") or []}
        if strange := next((token for token in known - added if not set(token) <= BYTE_OF_CHAR.keys()), None):
            raise ValueError(f"model.vocab has the token {strange[:40]!r}, which is not of a byte-level vocabulary")
        try:
            return decoding._replace(has_every_byte=has_every_byte(known))
        except ValueError as error:
            raise ValueError(f"model.vocab {error}") from None
    if decoding.has_byte_names and not all(f"<0x{byte:02X}>" in known for byte in range(256)):
        raise ValueError("model.vocab does not have a token for each byte")
    return decoding._replace(has_every_byte=decoding.has_byte_names)


def may_shorten(normalizer: object) -> bool:
    """Whether normalization may make a text shorter."""
    if normalizer is None:
        return False
    if not isinstance(normalizer, dict):
        return True
    if normalizer.get("type") == "Sequence":
        steps = normalizer.get("normalizers")
        return not isinstance(steps, list) or any(map(may_shorten, steps))
    if normalizer.get("type") == "Prepend":
        return False
    pattern = normalizer.get("pattern")
    given, put = pattern.get("String") if isinstance(pattern, dict) else None, normalizer.get("content")
    is_longer = isinstance(given, str) and isinstance(put, str) and len(put) >= len(given) > 0
    return not (normalizer.get("type") == "Replace" and is_longer)


def _check_bpe(model: Mapping[str, Any]) -> list[str]:
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError("model.vocab must be an object with a token for each id")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in vocab.values()):
        raise ValueError("model.vocab has an id that is no integer")
    if len(vocab) > MAX_IDS or sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(f"model.vocab does not have the ids from 0 to {len(vocab) - 1}, each once")
    if not isinstance(merges, list):
        raise ValueError("model.merges must be a list")
    for index, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ValueError(f"model.merges[{index}] is not two tokens")
        if not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            raise ValueError(f"model.merges[{index}] has a token that model.vocab lacks")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"model.{name} is not supported")
    return list(vocab)


def _check_unigram(model: Mapping[str, Any]) -> list[str]:
    vocab = model.get("vocab")
    if not isinstance(vocab, list) or not vocab or len(vocab) > MAX_IDS:
        raise ValueError("model.vocab must be a list of tokens and scores")
    for index, entry in enumerate(vocab):
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        if not is_pair or not isinstance(entry[1], int | float) or not abs(entry[1]) < 1e30:
            raise ValueError(f"model.vocab[{index}] is not a token and its score")
    tokens = [entry[0] for entry in vocab]
    if len(set(tokens)) != len(tokens):
        raise ValueError("model.vocab has a token twice")
    unknown = model.get("unk_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ValueError("model.unk_id is no id of model.vocab")
    return tokens


def _check_added(added: object, num_tokens: int) -> None:
    if added is not None and not isinstance(added, list):
        raise ValueError("added_tokens must be a list")
    if len(added or []) > MAX_ADDED:
        raise ValueError(f"added_tokens has {len(added or [])} tokens, more than {MAX_ADDED}")
    seen: set[object] = set()
    for index, token in enumerate(added or []):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
            raise ValueError(f"added_tokens[{index}] has no content")
        token_id = token.get("id")
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MAX_IDS:
            raise ValueError(f"added_tokens[{index}] has no id")
        if token_id in seen or token["content"] in seen:
            raise ValueError(f"added_tokens[{index}] is there twice")
        seen |= {token_id, token["content"]}


def _steps(decoder: object) -> Iterator[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        raise ValueError("decoder is missing")
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    steps = decoder.get("decoders") or []
    if not isinstance(steps, list):
        raise ValueError("decoder.decoders must be a list")
    for step in steps:
        if not isinstance(step, dict):
            raise ValueError("decoder is not a sequence of decoders")
        yield step


def _decoding(decoder: object) -> Decoding:
    steps = [step for step in _steps(decoder) if step.get("type") != "Fuse"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("byte_level")
    has_byte_names = "ByteFallback" in kinds
    rest = [step for step in steps if step.get("type") != "ByteFallback"]
    if rest and {**_SPACE_REPLACE, **rest[0]} == _SPACE_REPLACE and rest[1:] in ([], [_STRIP_ONE]):
        return Decoding("byte_fallback", "drop_one" if rest[1:] else "keep", has_byte_names)
    if [step.get("type") for step in rest] == ["Metaspace"] and rest[0].get("replacement") == SPACE_SYMBOL:
        keeps = rest[0].get("prepend_scheme") == "never" or rest[0].get("add_prefix_space") is False
        return Decoding("byte_fallback", "keep" if keeps else "drop_first_token", has_byte_names)
    raise ValueError(f"decoder {str(kinds)[:80]} is not supported")
