"""SentencePiece's BPE from a GGUF file's vocabulary: writes a SentencePiece model in memory and loads it.

Ids are llama.cpp's: user-defined tokens are found in the text first, and each text between them gets the leading space.
"""

import re
import struct
from collections.abc import Container, Mapping, Sequence

from llama_core.errors import TokenizerError
from llama_core.text.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, GgufVocabulary
from llama_core.text.sentencepiece_tokenizer import SPACE_SYMBOL, SentencePieceTokenizer, load_model
from llama_core.text.vocabulary_tokenizer import ControlToken, Vocabulary, VocabularyTokenizer, name_pattern

_BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")


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
