"""The tokenizer of Llama 1 and 2 and Code Llama: a SentencePiece BPE model, used exactly as Meta's reference uses it.

Decides which files are sound and which text may be encoded.

A damaged file must stop the start with its name, so this module checks the file twice. First it parses the outer protobuf
structure and the settings that decoding depends on, because SentencePiece accepts a file that is cut between two fields and
fills in defaults. Then SentencePiece parses the same bytes, and this module checks every piece.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from llama_core.errors import TokenizerError
from llama_core.text.tokenizers.files import read_bounded
from llama_core.text.tokenizers.tokenizer import ByteDecoding, LeadingSpace
from llama_core.text.tokenizers.vocabulary_tokenizer import ControlToken, Vocabulary, VocabularyTokenizer

MAX_MODEL_FILE_BYTES = 64 * 2**20  # Llama 2's is 0.5 MB; a checkpoint shard named by mistake is gigabytes
SPACE_SYMBOL = "\u2581"  # SentencePiece writes a space inside a piece as this character
BOS_NAME, EOS_NAME = "<s>", "</s>"  # whatever the file calls them

# Field numbers of sentencepiece_model.proto
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER, _MODEL_DENORMALIZER = 1, 2, 3, 5
_TRAINER_MODEL_TYPE, _TRAINER_BYTE_FALLBACK = 3, 35
_RULES_CHARSMAP, _RULES_ADD_DUMMY_PREFIX, _RULES_REMOVE_EXTRA_WHITESPACES = 2, 3, 4
_MODEL_TYPE_BPE = 2


class _Piece(NamedTuple):
    """What one token id adds to a text that has already begun."""

    raw: bytes  # UTF-8, or one byte of it for a byte-fallback token; b"" for a control token
    is_byte: bool
    leads_with_space: bool  # the text begins with a space that SentencePiece may drop where a text begins


class SentencePieceTokenizer(VocabularyTokenizer):
    """A Llama tokenizer. Immutable after construction; safe to share between threads."""

    byte_decoding: ByteDecoding = "sentencepiece"
    _user_tokens: Mapping[str, ControlToken] = {}

    def __init__(self, path: str | Path, num_rows: int | None = None) -> None:
        """Load and check a SentencePiece file. Raises TokenizerError that names it. num_rows: unused, no piece is added."""
        self.path = Path(path)
        self._load_model(read_bounded(self.path, MAX_MODEL_FILE_BYTES))

    def _load_model(self, data: bytes) -> None:
        try:
            self._settings = _read_settings(data)
            self._processor = load_model(data)
            self._pieces = _read_pieces(self._processor, self._settings.num_pieces)
        except ValueError as error:
            raise TokenizerError(f"tokenizer file {self.path} is damaged or not Llama's: {error}") from None
        self.leading_space = self._settings.leading_space
        super().__init__(self._read_vocabulary(), user_tokens=self._user_tokens)

    def _read_vocabulary(self) -> Vocabulary:
        """Control tokens by their names; the names of BOS and EOS are Llama's, whatever the file calls them."""
        processor = self._processor
        bos_id, eos_id = int(processor.bos_id()), int(processor.eos_id())
        control_ids = [i for i in range(len(self._pieces)) if processor.is_control(i)]
        names = {i: processor.id_to_piece(i) for i in control_ids} | {bos_id: BOS_NAME, eos_id: EOS_NAME}
        return Vocabulary(
            raws=tuple(piece.raw for piece in self._pieces),
            control_texts={name: token_id for token_id, name in names.items()},
            bos_id=bos_id,
            eos_id=eos_id,
            adds_bos=True,
        )

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """True for every file: this class is last in the registry, and its error describes an invalid file."""
        return True

    @cached_property
    def max_piece_chars(self) -> int:
        """Characters in the longest piece, or in the longest name of a control token."""
        longest = max((len(piece.raw.decode()) for piece in self._pieces if not piece.is_byte), default=1)
        return max(longest, *map(len, self.control_texts))

    def min_tokens(self, num_chars: int) -> int:
        """0 if this model rewrites text before it encodes (Llama's does not), because that may shorten the text."""
        return 0 if self._settings.may_shorten_text else -(-num_chars // self.max_piece_chars)

    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Raises InvalidParameter for anything that is not an id in [0, vocab_size)."""
        for token_id in ids:
            self._check(token_id)
        if not skip_special_tokens or max(ids, default=0) >= self.n_words:
            return super().decode(ids, skip_special_tokens=skip_special_tokens)
        return str(self._processor.decode(list(ids)))

    def leads_with_space(self, token_id: int) -> bool:
        self._check(token_id)
        return token_id < self.n_words and self._pieces[token_id].leads_with_space


class _Settings(NamedTuple):
    num_pieces: int
    leading_space: LeadingSpace
    may_shorten_text: bool


def load_model(data: bytes) -> sentencepiece.SentencePieceProcessor:
    """Raises ValueError for a model that SentencePiece refuses."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, ValueError):  # SentencePiece's own message names one of its source lines
        raise ValueError("SentencePiece cannot load it") from None
    return processor


def _read_pieces(processor: sentencepiece.SentencePieceProcessor, num_pieces: int) -> tuple[_Piece, ...]:
    """Every piece as decoding uses it. Raises ValueError if Llama's decoding would not be well defined."""
    if processor.vocab_size() != num_pieces:
        raise ValueError(f"{num_pieces} pieces in the file, {processor.vocab_size()} loaded")
    for name, token_id in (("BOS", processor.bos_id()), ("EOS", processor.eos_id())):
        if not 0 <= token_id < num_pieces or not processor.is_control(token_id):
            raise ValueError(f"it has no {name} control piece")
    pieces = tuple(_read_piece(processor, token_id) for token_id in range(num_pieces))
    if sorted(piece.raw[0] for piece in pieces if piece.is_byte) != list(range(256)):
        raise ValueError("it does not have one piece for each of the 256 bytes")
    return pieces


def _read_piece(processor: sentencepiece.SentencePieceProcessor, token_id: int) -> _Piece:
    raw: str = processor.id_to_piece(token_id)  # UnicodeDecodeError is a ValueError
    if processor.is_byte(token_id):
        return _Piece(bytes([int(raw.removeprefix("<0x").removesuffix(">"), 16)]), True, False)
    if processor.is_control(token_id):
        return _Piece(b"", False, False)
    if processor.is_unknown(token_id):
        return _Piece(processor.decode([token_id]).encode(), False, False)  # " \u2047 " unless the model says otherwise
    return _Piece(raw.replace(SPACE_SYMBOL, " ").encode(), False, raw.startswith(SPACE_SYMBOL))


def _read_settings(data: bytes) -> _Settings:
    num_pieces = 0
    sections: dict[int, dict[int, int | bytes]] = {}
    for number, value in _fields(data):
        if number == _MODEL_PIECES:
            num_pieces += 1
        elif number in (_MODEL_TRAINER, _MODEL_NORMALIZER, _MODEL_DENORMALIZER):
            if not isinstance(value, bytes):
                raise ValueError(f"its section {number} is not a message")
            sections[number] = sections.get(number, {}) | dict(_fields(value))
    # SentencePiece fills in defaults for sections that a cut at a field's boundary took away.
    if not num_pieces or _MODEL_TRAINER not in sections or _MODEL_NORMALIZER not in sections:
        raise ValueError("its pieces, trainer settings or normalizer settings are missing")
    trainer, normalizer = sections[_MODEL_TRAINER], sections[_MODEL_NORMALIZER]
    if trainer.get(_TRAINER_MODEL_TYPE) != _MODEL_TYPE_BPE or not trainer.get(_TRAINER_BYTE_FALLBACK):
        raise ValueError("it is not a BPE model with byte fallback")
    if sections.get(_MODEL_DENORMALIZER, {}).get(_RULES_CHARSMAP):
        raise ValueError("it rewrites text after decoding, which a stream cannot follow")
    add_dummy_prefix = bool(normalizer.get(_RULES_ADD_DUMMY_PREFIX, True))
    remove_extra_whitespaces = bool(normalizer.get(_RULES_REMOVE_EXTRA_WHITESPACES, True))
    return _Settings(
        num_pieces=num_pieces,
        leading_space="drop_all" if remove_extra_whitespaces else "drop_one" if add_dummy_prefix else "keep",
        may_shorten_text=remove_extra_whitespaces or bool(normalizer.get(_RULES_CHARSMAP)),
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message's fields; raises ValueError where it is cut or malformed."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire_type = key & 7
        if wire_type == 0:
            number_value, at = _varint(message, at)
            yield key >> 3, number_value
            continue
        if wire_type == 2:
            num_bytes, at = _varint(message, at)
        elif wire_type in (1, 5):
            num_bytes = 8 if wire_type == 1 else 4
        else:
            raise ValueError("it is not a protobuf message")
        if num_bytes > len(message) - at:
            raise ValueError("it is cut short")
        yield key >> 3, message[at : at + num_bytes]
        at += num_bytes


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer of at most 10 bytes, 7 bits each, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at == len(message):
            raise ValueError("it is cut short")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("it is not a protobuf message")
