"""The files of a tokenizer in Hugging Face's format: which belong to a folder, and what they say of special tokens."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers

from llama_core.errors import TokenizerError
from llama_core.text.files import CONFIG_FILE, GENERATION_FILE, MAP_FILE, MODEL_FILE, SIDE_FILES, read_json_object
from llama_core.text.hugging_face_structure import MAX_ADDED

TOKENIZER_FILE: Final = "tokenizer.json"
MAX_TOKENIZER_BYTES: Final = 256 * 2**20
_MAX_SIDE_BYTES: Final = 32 * 2**20
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SideFiles:
    """The files beside tokenizer.json that exist. Raises TokenizerError that names the file and the field."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = {name: self._object(name) for name in SIDE_FILES}
        self._config = self._read[CONFIG_FILE]

    def _object(self, name: str) -> Mapping[str, Any]:
        path = self._folder / name
        return read_json_object(path, _MAX_SIDE_BYTES) if path.exists() else {}

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Contents by name: bos_token, eos_token, ... tokenizer_config.json counts before special_tokens_map.json."""
        found: dict[str, str] = {}
        for file in (MAP_FILE, CONFIG_FILE):
            for name in _NAMES:
                if name in self._read[file]:
                    found.pop(name, None)
                    if (value := self._read[file][name]) is not None:
                        found[name] = self._content(file, name, value)
        return found

    @cached_property
    def further_special_tokens(self) -> list[str]:
        """Contents of the tokens that have no name of their own."""
        found: list[str] = []
        for file in (MAP_FILE, CONFIG_FILE):
            for name in _LISTS:
                value = self._read[file].get(name) or []
                items = value.values() if isinstance(value, dict) else value
                if not isinstance(value, dict | list):
                    raise self._error(file, name, "must be a list of tokens")
                found += [self._content(file, name, item) for item in items]
        return list(dict.fromkeys(found))

    @property
    def added_tokens(self) -> Iterator[tuple[int, tokenizers.AddedToken]]:
        """Ids and tokens of tokenizer_config.json's added_tokens_decoder, by id."""
        given = self._config.get("added_tokens_decoder") or {}
        if not isinstance(given, dict):
            raise self._error(CONFIG_FILE, "added_tokens_decoder", "must be an object")
        if len(given) > MAX_ADDED:
            raise self._error(CONFIG_FILE, "added_tokens_decoder", f"has more than {MAX_ADDED} tokens")
        found: dict[int, tokenizers.AddedToken] = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdigit() and len(key) < 9 and isinstance(value, dict)):
                raise self._error(CONFIG_FILE, "added_tokens_decoder", f"has the entry {key[:40]!r}")
            content = self._content(CONFIG_FILE, "added_tokens_decoder", value)
            flags = {flag: value[flag] for flag in _FLAGS if flag in value}
            if not all(isinstance(flag, bool) for flag in flags.values()):
                raise self._error(CONFIG_FILE, "added_tokens_decoder", f"has flags that are no booleans at {key}")
            found[int(key)] = tokenizers.AddedToken(content, **flags)
        yield from sorted(found.items(), key=lambda item: item[0])

    def adds_bos(self) -> bool | None:
        """What tokenizer_config.json says, as transformers reads it; None if the post-processor of tokenizer.json counts."""
        if "add_bos_token" not in self._config and "add_eos_token" not in self._config:
            return None
        value = self._config.get("add_bos_token", False)
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
