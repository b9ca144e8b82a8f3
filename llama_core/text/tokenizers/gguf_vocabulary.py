"""The vocabulary in a GGUF file, checked by name; and SentencePiece's BPE over it: a SentencePiece model written in memory.

Ids are llama.cpp's: user-defined tokens are found in the text first, and each text between them gets the leading space.
"""

import re
import struct
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llama_core.errors import TokenizerError
from llama_core.text.tokenizers.library_tokenizer import MAX_ADDED
from llama_core.text.tokenizers.sentencepiece_tokenizer import SPACE_SYMBOL, SentencePieceTokenizer, load_model
from llama_core.text.tokenizers.vocabulary_tokenizer import (
    END_NAMES,
    ControlToken,
    Vocabulary,
    VocabularyTokenizer,
    is_control_name,
    name_pattern,
    warn_left_out,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_PREFIX: Final = "tokenizer.ggml."
_BYTE_NAME: Final = re.compile(r"<0x[0-9A-F]{2}>")


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


class GgufSentencePiece(SentencePieceTokenizer):
    """A tokenizer of the kind `llama`."""

    def __init__(self, given: GgufVocabulary) -> None:
        """Raises TokenizerError that names the file and the key."""
        self.path = given.path
        self._given = given
        user_defined = {text.replace(SPACE_SYMBOL, " "): token_id for text, token_id in given.user_tokens.items()}
        self._user_tokens = {name: ControlToken(token_id) for name, token_id in user_defined.items()}
        self._load_model(_model(given, given.control_names))

    def _keep_from_text(self, tokens: Mapping[str, ControlToken]) -> None:
        super()._keep_from_text(tokens)
        kept = self._control_names.keys() | {token.token_id for token in tokens.values()}
        if kept > self._control_names.keys():  # SentencePiece itself finds user-defined pieces in a text
            self._processor = load_model(_model(self._given, kept))
        self._user_pattern = name_pattern(self._user_tokens.keys() - tokens.keys())

    def _read_vocabulary(self) -> Vocabulary:
        given = self._given
        return Vocabulary(
            raws=tuple(b"" if i in given.control_names else piece.raw for i, piece in enumerate(self._pieces)),
            control_texts=given.control_texts,
            bos_id=given.bos_id,
            eos_id=given.eos_id,
            adds_bos=given.adds_bos(True),
            stop_ids=given.stop_ids,
            appended=(given.eos_id,) if given.flag("add_eos_token", False) else (),
        )

    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._user_pattern.finditer(text):
            ids += self._processor.encode(text[at : match.start()])
            ids.append(self._user_tokens[match[0]].token_id)
            at = match.end()
        ids += self._processor.encode(text[at:])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return VocabularyTokenizer.decode(self, ids, skip_special_tokens=skip_special_tokens)


def _model(given: GgufVocabulary, kept: Container[int]) -> bytes:
    """A ModelProto (sentencepiece_model.proto) with the file's pieces, scores and types. kept: ids that no text becomes."""
    if given.bos_id is None:
        raise given.error("bos_token_id", "is missing")
    scores = given.scores()
    unknown = [token_id for token_id, kind in enumerate(given.kinds) if kind == UNKNOWN]
    if not unknown:
        raise given.error("token_type", "has no token of the type unknown")
    pieces = []
    for token_id, (text, kind) in enumerate(zip(given.texts, given.kinds, strict=True)):
        if not text or "\0" in text:
            raise given.error(f"tokens[{token_id}]", "is empty, or has a NUL character")
        if kind == BYTE and not _BYTE_NAME.fullmatch(text):
            raise given.error(f"tokens[{token_id}]", f"is no name of a byte: {text[:40]!r}")
        if token_id in kept and token_id != unknown[0]:
            kind = CONTROL  # SentencePiece has one unknown piece
        piece = _text(1, text) + b"\x15" + struct.pack("<f", scores[token_id]) + _number(3, kind)
        pieces.append(_message(1, piece))
    bpe_with_bytes = _number(3, 2) + _number(35, 1)
    names = (
        _text(45, given.texts[unknown[0]]) + _text(46, given.texts[given.bos_id]) + _text(47, given.texts[given.eos_id])
    )
    no_pad = _number(43, 2**64 - 1)
    adds_prefix = given.flag("add_space_prefix", True)
    if given.flag("remove_extra_whitespaces", False):
        raise TokenizerError(f"{given.path}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    normalizer = _text(1, "identity") + _number(3, int(adds_prefix)) + _number(4, 0) + _number(5, 1)
    return b"".join([*pieces, _message(2, bpe_with_bytes + names + no_pad), _message(3, normalizer)])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
