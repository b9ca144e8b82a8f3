"""A tokenizer whose plain text the `tokenizers` library encodes: tokenizer.json, or a vocabulary of a GGUF file.

The library finds control tokens itself where that is exact (`encode_special`). A text that must not become one is encoded by a
second pipeline over the same model, in which names of control tokens are plain text.
"""

import secrets
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Final

import tokenizers

from llama_core.errors import SpecialTags, TokenizerError
from llama_core.text.tokenizers.files import encode_guarded
from llama_core.text.tokenizers.tokenizer import ByteDecoding, LeadingSpace, TextPart
from llama_core.text.tokenizers.vocabulary_tokenizer import (
    ControlToken,
    Vocabulary,
    VocabularyTokenizer,
    check_encodable,
)

# A user-defined token that precedes a text which does not begin the prompt. Its name is noncharacters and random digits, so no
# text has it.
_MARK: Final = f"\ufdd0{secrets.token_hex(16)}\ufdd1"
MAX_ADDED: Final = 2**14  # tokens: the library's search for them, and the server's, grow with their number


def _byte_chars() -> dict[int, str]:
    """GPT-2's map. Printable bytes of Latin-1 are themselves; the others are the characters from U+0100 on, in their order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


CHAR_OF_BYTE: Final[Mapping[int, str]] = _byte_chars()
BYTE_OF_CHAR: Final[Mapping[str, int]] = {char: byte for byte, char in CHAR_OF_BYTE.items()}
_PRINTABLE_ASCII: Final = range(0x20, 0x7F)
_UTF8_BYTES: Final = [*range(0xC0), *range(0xC2, 0xF5)]  # that occur in UTF-8


def has_every_byte(tokens: Set[str]) -> bool:
    """Whether a vocabulary has a token for each byte of UTF-8. BPE leaves a byte without a token out of the ids.

    Vocabularies of real models lack a few that were not in their training text. Raises ValueError for one without a printable
    character of ASCII, which is damaged.
    """
    if missing := [byte for byte in _PRINTABLE_ASCII if CHAR_OF_BYTE[byte] not in tokens]:
        raise ValueError(f"has no token for the byte {missing[0]}")
    return all(CHAR_OF_BYTE[byte] in tokens for byte in _UTF8_BYTES)


def bytes_of(token: str) -> bytes | None:
    """The bytes that a vocabulary writes as `token`, or None if it has a character that stands for no byte."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return None


class LibraryTokenizer(VocabularyTokenizer):
    """A pipeline of the `tokenizers` library with its vocabulary."""

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        *,
        byte_decoding: ByteDecoding,
        leading_space: LeadingSpace = "keep",
        may_shorten_text: bool = False,
        control_tokens: Mapping[str, ControlToken] | None = None,
        user_tokens: Mapping[str, ControlToken] | None = None,
    ) -> None:
        self._pipeline = pipeline
        super().__init__(vocabulary, control_tokens, user_tokens)
        self.byte_decoding = byte_decoding
        self.leading_space = leading_space
        self._may_shorten_text = may_shorten_text

    def _keep_from_text(self, tokens: Mapping[str, ControlToken]) -> None:
        super()._keep_from_text(tokens)
        added = self._pipeline.get_added_tokens_decoder()
        # The library looks for the names of normalized tokens in the text after normalization.
        self._normalizes_names = self._pipeline.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in tokens
        )
        self._plain = _plain(self._pipeline, added, tokens)

    def min_tokens(self, num_chars: int) -> int:
        return 0 if self._may_shorten_text else super().min_tokens(num_chars)

    def encode_special(self, s: str, *, bos: bool = False) -> list[int]:
        check_encodable(s)
        ids = encode_guarded(lambda: list(self._pipeline.encode(s, add_special_tokens=False).ids))
        return self._with_bos(ids) if bos else ids

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        text = "".join(part.text for part in parts)
        if not self._normalizes_names and self._only_trusted(text, parts):
            return self.encode_special(text)  # so the ids are the library's
        return super().encode_parts(parts)

    def _only_trusted(self, text: str, parts: Sequence[TextPart]) -> bool:
        """Whether each name of a control token in `text` lies within one part that parses them."""
        spans, at = [], 0
        for part in parts:
            if part.parses_control:
                spans.append((at, at + len(part.text)))
            at += len(part.text)
        index = 0
        for match in self._control_pattern.finditer(text):
            while index < len(spans) and spans[index][1] < match.end():
                index += 1
            if index == len(spans) or match.start() < spans[index][0]:
                return False
        return True

    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        if is_first:
            return encode_guarded(lambda: list(self._plain.encode(text, add_special_tokens=False).ids))
        return encode_guarded(lambda: list(self._plain.encode(_MARK + text, add_special_tokens=False).ids)[1:])

    _begins_after_control = False

    def _spell(self, token_id: int) -> list[int]:
        ids: list[int] = []
        for char in self._spelled_names[token_id]:
            ids += self._spell_char(char)
        if not self._never_from_text.isdisjoint(ids):
            raise SpecialTags("text contains a control token of the tokenizer")
        return ids

    def _spell_char(self, char: str) -> Iterator[int]:
        if self.byte_decoding == "byte_level":
            names = [CHAR_OF_BYTE[byte] for byte in char.encode()]
        elif self._pipeline.token_to_id(char) is not None:
            names = [char]
        else:
            names = [f"<0x{byte:02X}>" for byte in char.encode()]
        for name in names:
            if (token_id := self._pipeline.token_to_id(name)) is None:
                raise SpecialTags("text contains a control token of the tokenizer")
            yield token_id


def _plain(
    pipeline: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken], kept: Container[str]
) -> tokenizers.Tokenizer:
    """Another pipeline over the same model, without a copy of the vocabulary, in which the names in `kept` are text."""
    other = tokenizers.Tokenizer(pipeline.model)
    if pipeline.normalizer is not None:
        other.normalizer = pipeline.normalizer
    if pipeline.pre_tokenizer is not None:
        other.pre_tokenizer = pipeline.pre_tokenizer
    # One call: the library builds its search anew after each.
    other.add_tokens(
        [as_special(added[each]) if added[each].content in kept else added[each] for each in sorted(added)]
    )
    if other.get_added_tokens_decoder().keys() != added.keys():
        raise TokenizerError("the ids of the added tokens do not follow those of the vocabulary")
    other.encode_special_tokens = True
    other.add_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
    return other


def as_special(token: tokenizers.AddedToken, **changed: bool) -> tokenizers.AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(token.content, special=True, **flags | changed)
