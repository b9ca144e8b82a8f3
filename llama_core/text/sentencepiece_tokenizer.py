"""The tokenizer of Llama 1 and 2 and Code Llama: a SentencePiece BPE model, used exactly as Meta's reference uses it.

Decides which files are sound and which text may be encoded.

A damaged file must stop the start with its name, so this module checks the file twice. First it parses the outer protobuf
structure and the settings that decoding depends on, because SentencePiece accepts a file that is cut between two fields and
fills in defaults. Then SentencePiece parses the same bytes, and this module checks every piece.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from llama_core.errors import InvalidParameter, InvalidRequest, SpecialTags, TokenizerError
from llama_core.text.tokenizer import LeadingSpace, Tokenizer, is_encodable, name_of_bytes

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


class SentencePieceTokenizer(Tokenizer):
    """A Llama tokenizer. Immutable after construction; safe to share between threads."""

    def __init__(self, path: str | Path) -> None:
        """Load and check a SentencePiece file. Raises TokenizerError that names it."""
        self.path = Path(path)
        data = _read(self.path)
        try:
            self._settings = _read_settings(data)
            self._processor = _load(data)
            self._pieces = _read_pieces(self._processor, self._settings.num_pieces)
        except ValueError as error:
            raise TokenizerError(f"tokenizer file {self.path} is damaged or not Llama's: {error}") from None
        self._control_ids = frozenset(i for i in range(self.n_words) if self._processor.is_control(i))
        self._max_id = self.n_words - 1

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """True for every file: this class is last in the registry, and its error describes an invalid file."""
        return True

    @property
    def n_words(self) -> int:
        """Number of ids; every id is in [0, n_words)."""
        return len(self._pieces)

    @property
    def bos_id(self) -> int:
        return int(self._processor.bos_id())

    @property
    def eos_id(self) -> int:
        return int(self._processor.eos_id())

    @property
    def pad_id(self) -> int:
        """-1 in Llama 2: not an id. Never look it up in an embedding."""
        return int(self._processor.pad_id())

    @property
    def stop_ids(self) -> frozenset[int]:
        """EOS alone."""
        return frozenset({self.eos_id})

    @property
    def leading_space(self) -> LeadingSpace:
        """What decoding does with the spaces that begin a text ("drop_one" for Llama)."""
        return self._settings.leading_space

    @cached_property
    def max_piece_chars(self) -> int:
        """Characters in the longest piece."""
        return max((len(piece.raw.decode()) for piece in self._pieces if not piece.is_byte), default=1)

    def min_tokens(self, num_chars: int) -> int:
        """The fewest tokens that any text of `num_chars` characters can take, to refuse a long text without encoding it.

        0 if this model rewrites text before it encodes (Llama's does not), because that may shorten the text.
        """
        return 0 if self._settings.may_shorten_text else -(-num_chars // self.max_piece_chars)

    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]:
        """Token ids of `s`. Text never becomes a control token: "<s>" and "</s>" are plain characters.

        Raises InvalidRequest for a lone surrogate, which is no character.
        """
        if not is_encodable(s):
            raise InvalidRequest("text contains a lone surrogate, which is not a character")
        ids: list[int] = self._processor.encode(s)
        if not self._control_ids.isdisjoint(ids):
            raise SpecialTags("text contains a control token of the tokenizer")
        if bos:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Raises InvalidParameter for anything that is not an id in [0, n_words)."""
        for token_id in ids:
            self._check(token_id)
        return str(self._processor.decode(list(ids)))

    def token_text(self, token_id: int) -> str:
        """One id decoded alone, so without its leading space: the `tokens` field of the reference's results."""
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the id adds to a text that has begun, its leading space included; b"" for a control token."""
        self._check(token_id)
        return self._pieces[token_id].raw

    def token_name(self, token_id: int) -> str:
        """The id as log-probabilities show it: "<s>", "</s>", its text, or the bytes of part of a character."""
        if token_id == self.bos_id:
            return BOS_NAME
        return EOS_NAME if token_id == self.eos_id else name_of_bytes(self.token_bytes(token_id))

    def leads_with_space(self, token_id: int) -> bool:
        """Whether the id's text begins with a space that decoding may drop where a text begins."""
        self._check(token_id)
        return self._pieces[token_id].leads_with_space

    def is_control(self, token_id: int) -> bool:
        """Whether the id has no text: BOS, EOS and whatever else the model declares as control."""
        self._check(token_id)
        return token_id in self._control_ids

    def _check(self, token_id: int) -> None:
        if not isinstance(token_id, int) or not 0 <= token_id <= self._max_id:
            raise InvalidParameter(f"a token id must be an integer from 0 to {self._max_id}", param="tokens")


class _Settings(NamedTuple):
    num_pieces: int
    leading_space: LeadingSpace
    may_shorten_text: bool


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise TokenizerError(f"tokenizer file {path} does not exist or is not a file")
        num_bytes = path.stat().st_size
        if not 0 < num_bytes <= MAX_MODEL_FILE_BYTES:
            limit = f"must have 1 to {MAX_MODEL_FILE_BYTES} bytes"
            raise TokenizerError(f"tokenizer file {path} {limit}, not {num_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"tokenizer file {path} cannot be read: {error.strerror}") from None


def _load(data: bytes) -> sentencepiece.SentencePieceProcessor:
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
    """An unsigned integer of at most 10 bytes, 7 bits each, and the offset behind it."""
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
