"""What the files of a tokenizer in Hugging Face's format say: of special tokens, and of how ids become text."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from llama_core.errors import TokenizerError
from llama_core.text.tokenizers.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    MAP_FILE,
    MODEL_FILE,
    SIDE_FILES,
    read_json_object,
)
from llama_core.text.tokenizers.library_tokenizer import bytes_of, has_every_byte
from llama_core.text.tokenizers.sentencepiece_tokenizer import SPACE_SYMBOL
from llama_core.text.tokenizers.tokenizer import ByteDecoding, LeadingSpace

_MAX_SIDE_BYTES: Final = 32 * 2**20
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_BYTE_NAME: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BYTE_NAMES: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_SPACE_REPLACE: Final = {"type": "Replace", "pattern": {"String": SPACE_SYMBOL}, "content": " "}
_STRIP_ONE: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class SideFiles:
    """The files beside tokenizer.json that exist. Raises TokenizerError that names the file and the field."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Mapping[str, Any]] = {
            name: read_json_object(folder / name, _MAX_SIDE_BYTES) if (folder / name).exists() else {}
            for name in SIDE_FILES
        }

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Contents by name: bos_token, eos_token, ... tokenizer_config.json counts before special_tokens_map.json."""
        files = {name: file for file in (MAP_FILE, CONFIG_FILE) for name in _NAMES if name in self._read[file]}
        named = {name: (file, self._read[file][name]) for name, file in files.items()}
        return {name: self._content(file, name, value) for name, (file, value) in named.items() if value is not None}

    @cached_property
    def further_special_tokens(self) -> list[str]:
        """Contents of the tokens that have no name of their own."""
        found: list[str] = []
        for file in (MAP_FILE, CONFIG_FILE):
            for name in _LISTS:
                value = self._read[file].get(name) or []
                if not isinstance(value, dict | list):
                    raise self._error(file, name, "must be a list of tokens")
                items = value.values() if isinstance(value, dict) else value
                found += [self._content(file, name, item) for item in items]
        return list(dict.fromkeys(found))

    @cached_property
    def added_tokens(self) -> Mapping[int, tokenizers.AddedToken]:
        """tokenizer_config.json's added_tokens_decoder, by id."""
        name = "added_tokens_decoder"
        given = self._read[CONFIG_FILE].get(name) or {}
        found: dict[int, tokenizers.AddedToken] = {}
        try:
            for key, value in given.items():
                flags = {flag: value[flag] for flag in _FLAGS if flag in value}
                found[int(key)] = tokenizers.AddedToken(self._content(CONFIG_FILE, name, value), **flags)
        except (AttributeError, TypeError, ValueError) as error:
            raise self._error(CONFIG_FILE, name, f"is not tokens by their ids: {str(error)[:200]}") from None
        return dict(sorted(found.items()))

    def adds_bos(self) -> bool | None:
        """What tokenizer_config.json says, as transformers reads it; None if the post-processor of tokenizer.json counts."""
        config = self._read[CONFIG_FILE]
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return None
        value = config.get("add_bos_token", False)
        if value is not None and not isinstance(value, bool):
            raise self._error(CONFIG_FILE, "add_bos_token", "must be true or false")
        return bool(value)

    def token_ids(self, name: str) -> list[int]:
        """Ids called `name` (bos_token_id, eos_token_id) in generation_config.json, or else in config.json."""
        for file in (GENERATION_FILE, MODEL_FILE):
            value = self._read[file].get(name)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
                raise self._error(file, name, "must be a token id or a list of them")
            return [each for each in ids if each >= 0]
        return []

    def _content(self, file: str, name: str, value: object) -> str:
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str) or not content:
            raise self._error(file, name, "must be a token's text, or an object with its content")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise self._error(file, name, "contains a lone surrogate, which is not a character") from None
        return content

    def _error(self, file: str, name: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self._folder / file}: {name} {problem}")


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


def read_decoding(pipeline: tokenizers.Tokenizer, tokens: Collection[str]) -> Decoding:
    """tokens: the vocabulary. Raises ValueError for a decoder that a stream cannot follow."""
    decoder = as_json(pipeline.decoder)
    given = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps = [step for step in given if step["type"] != "Fuse"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("byte_level", has_every_byte=has_every_byte(frozenset(tokens)))
    has_bytes = "ByteFallback" in kinds
    if has_bytes and not frozenset(tokens) >= _BYTE_NAMES:
        raise ValueError("its vocabulary does not have a token for each byte")
    rest = [step for step in steps if step["type"] != "ByteFallback"]
    if rest[:1] == [_SPACE_REPLACE] and rest[1:] in ([], [_STRIP_ONE]):
        return Decoding("byte_fallback", "drop_one" if rest[1:] else "keep", has_bytes, has_bytes)
    if kinds[-1:] == ["Metaspace"] and len(rest) == 1 and rest[0]["replacement"] == SPACE_SYMBOL:
        keeps = rest[0]["prepend_scheme"] == "never"
        return Decoding("byte_fallback", "keep" if keeps else "drop_first_token", has_bytes, has_bytes)
    raise ValueError(f"decoder {str(kinds)[:80]} is not supported")


def as_json(step: Any) -> Any:
    """A normalizer, pre-tokenizer or decoder as the library writes it."""
    return None if step is None else json.loads(step.__getstate__())


def may_shorten(normalizer: Any) -> bool:
    """Whether normalization may make a text shorter. normalizer: `as_json`."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return False
    if normalizer["type"] == "Sequence":
        return any(map(may_shorten, normalizer["normalizers"]))
    if normalizer["type"] != "Replace" or "String" not in normalizer["pattern"]:
        return True
    return len(normalizer["content"]) < len(normalizer["pattern"]["String"])


def expressions_of(step: Any) -> Iterator[str]:
    """The regular expressions in a normalizer or pre-tokenizer. step: `as_json`."""
    for key, value in step.items() if isinstance(step, dict) else enumerate(step) if isinstance(step, list) else ():
        if key == "Regex":
            yield value
        yield from expressions_of(value)
