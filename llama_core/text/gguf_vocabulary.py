"""The parts of a GGUF file's vocabulary that every kind has: tokens, their types, special ids and flags. Checked by name."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llama_core.errors import TokenizerError
from llama_core.text.hugging_face_structure import MAX_ADDED
from llama_core.text.vocabulary_tokenizer import END_NAMES, is_control_name, warn_left_out

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_PREFIX: Final = "tokenizer.ggml."


class GgufVocabulary:
    """Raises TokenizerError that names the file and the key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], num_rows: int | None = None) -> None:
        """num_rows: of the embedding, None if unknown. Added tokens past it are left out, unless one is BOS or EOS."""
        self.path = path
        self._metadata = metadata
        self.texts = self._strings("tokens")
        self.kinds = self._kinds()
        self._num_ids = len(self.texts)
        if num_rows is not None and not {NORMAL, BYTE}.intersection(self.kinds[num_rows:]):
            warn_left_out(path, self.texts[num_rows:], num_rows)
            del self.texts[num_rows:], self.kinds[num_rows:]
        self.bos_id = self._token_id("bos_token_id")
        eos_id = self._token_id("eos_token_id")
        ends = [self._token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        self.stop_ids = frozenset(token_id for token_id in ends if token_id is not None and token_id < len(self.texts))
        if eos_id is None:
            raise self.error("eos_token_id", "is missing")
        for name, token_id in (("bos", self.bos_id), ("eos", eos_id)):
            if token_id is not None and token_id >= len(self.texts):
                raise self.error(f"{name}_token_id", f"is {token_id}, but the model has only {num_rows} rows")
        self.eos_id = eos_id
        self.control_names = self._control_names()
        if len(self.control_names) + len(self.user_tokens) > MAX_ADDED:
            raise self.error("token_type", f"has more than {MAX_ADDED} control and user-defined tokens")
        if len(set(self.texts)) != len(self.texts):
            raise self.error("tokens", "has a token twice")

    @cached_property
    def control_texts(self) -> Mapping[str, int]:
        return {text: token_id for token_id, text in self.control_names.items()}

    @cached_property
    def user_tokens(self) -> Mapping[str, int]:
        """Tokens with text that are found in a text before the rest is encoded."""
        return {
            text: token_id
            for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind == USER_DEFINED and text and token_id not in self.control_names
        }

    def adds_bos(self, default: bool) -> bool:
        return self.flag("add_bos_token", default)

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {str(value)[:40]!r}")
        return value

    def scores(self) -> list[float]:
        scores = self._metadata.get(f"{_PREFIX}scores")
        if not isinstance(scores, list) or len(scores) != self._num_ids:
            raise self.error("scores", f"must have {self._num_ids} numbers")
        if not all(isinstance(score, int | float) and abs(score) < 1e30 for score in scores):
            raise self.error("scores", "has a value that is no finite number")
        return [float(score) for score in scores[: len(self.texts)]]

    def error(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: {_PREFIX}{key} {problem}")

    def _strings(self, key: str) -> list[str]:
        values = self._metadata.get(_PREFIX + key)
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise self.error(key, "must be a list of tokens")
        return values

    def _kinds(self) -> list[int]:
        kinds = self._metadata.get(f"{_PREFIX}token_type", [NORMAL] * len(self.texts))
        if not isinstance(kinds, list) or len(kinds) != len(self.texts):
            raise self.error("token_type", f"must have {len(self.texts)} types")
        for token_id, kind in enumerate(kinds):
            if not isinstance(kind, int) or not NORMAL <= kind <= BYTE:
                raise self.error(f"token_type[{token_id}]", f"is the unknown type {str(kind)[:40]!r}")
        return kinds

    def _control_names(self) -> Mapping[int, str]:
        """Control and unknown tokens. BOS, EOS and marks of a turn are control tokens in files that do not say so."""
        named = {self.bos_id, *self.stop_ids}
        return {
            token_id: text
            for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in (CONTROL, UNKNOWN)
            or token_id in named
            or text in END_NAMES
            or (kind == USER_DEFINED and is_control_name(text))
        }

    def _token_id(self, key: str) -> int | None:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < self._num_ids:
            raise self.error(key, f"is {str(value)[:40]!r}, not an id of {self._num_ids} tokens")
        return value
