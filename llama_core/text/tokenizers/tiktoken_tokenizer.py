"""Meta's Llama 3 tokenizer.model: a token in base64 and its rank on each line, through the `tiktoken` library.

The file has neither the split pattern nor the special tokens; both are Llama 3's, as in Meta's `llama3` and `llama-models`.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import tiktoken

from llama_core.errors import TokenizerError
from llama_core.text.tokenizers.files import encode_guarded, read_bounded
from llama_core.text.tokenizers.vocabulary_tokenizer import Vocabulary, VocabularyTokenizer

_MAX_FILE_BYTES: Final = 64 * 2**20  # Llama 3's is 2.2 MB
_MAX_TOKEN_BYTES: Final = 1024
_NUM_SPECIAL: Final = 256
_LINE: Final = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,8})")
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Names of the first of the 256 ids after the vocabulary, as in Llama 3.1 and later; the others are reserved. Llama 3.0 has the
# same tokens for text and chat, and reserved names for the rest.
_NAMES: Final = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *(
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ),
    *("<|python_tag|>", "<|image|>"),
)
# Longer texts, and longer runs without a change between white space and other characters, are encoded in pieces, as Meta's own
# tokenizer does: the library is slow, or runs out of stack, on such texts.
_MAX_TEXT_CHARS: Final = 400_000
_MAX_RUN_CHARS: Final = 25_000
_RUN: Final = re.compile(rf"\s{{1,{_MAX_RUN_CHARS}}}|\S{{1,{_MAX_RUN_CHARS}}}")


def special_names() -> list[str]:
    """The names of Llama 3's special tokens, in the order of their ids."""
    num_reserved = _NUM_SPECIAL - len(_NAMES)
    return [*_NAMES, *(f"<|reserved_special_token_{number}|>" for number in range(2, 2 + num_reserved))]


class TiktokenTokenizer(VocabularyTokenizer):
    """Llama 3's tokenizer. Immutable after construction; safe to share between threads."""

    def __init__(self, path: str | Path, num_rows: int | None = None) -> None:
        """Load and check the file. Raises TokenizerError that names it and the line. num_rows: unused, no token is added."""
        self.path = Path(path)
        tokens = _read_tokens(self.path)
        names = special_names()
        control_texts = {name: len(tokens) + offset for offset, name in enumerate(names)}
        self._encoding = tiktoken.Encoding(
            name=self.path.name,
            pat_str=_SPLIT,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens=control_texts,
        )
        super().__init__(
            Vocabulary(
                raws=[*tokens, *[b""] * len(names)],
                control_texts=control_texts,
                bos_id=control_texts["<|begin_of_text|>"],
                eos_id=control_texts["<|end_of_text|>"],
                adds_bos=True,
            )
        )

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether the file begins with a token in base64 and a rank."""
        try:
            with path.open("rb") as file:
                first = file.read(2 * _MAX_TOKEN_BYTES).split(b"\n", 1)[0].rstrip(b"\r")
        except OSError:
            return False
        return _LINE.fullmatch(first) is not None

    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        pieces = map(self._encoding.encode_ordinary, split_long(text))
        return encode_guarded(lambda: list(chain.from_iterable(pieces)))


def split_long(text: str) -> Iterator[str]:
    """Pieces of at most 400,000 characters, in which no run of white space or of other characters is longer than 25,000."""
    for begin in range(0, len(text), _MAX_TEXT_CHARS):
        part = text[begin : begin + _MAX_TEXT_CHARS]
        at = 0
        was_space: bool | None = None
        for match in _RUN.finditer(part):
            is_space = match[0][0].isspace()
            if is_space == was_space:  # the run goes on after its first 25,000 characters
                yield part[at : match.start()]
                at = match.start()
            was_space = is_space
        yield part[at:]


def _read_tokens(path: Path) -> list[bytes]:
    """Tokens by rank. Raises TokenizerError that names the file and the line."""
    tokens: list[bytes] = []
    for number, line in enumerate(read_bounded(path, _MAX_FILE_BYTES).split(b"\n"), 1):
        line = line.rstrip(b"\r")
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None or int(match[2]) != len(tokens):
            raise _error(path, number, f"is not a token in base64 and the rank {len(tokens)}")
        try:
            token = base64.b64decode(match[1], validate=True)
        except binascii.Error:
            raise _error(path, number, "has a token that is not base64") from None
        if not 0 < len(token) <= _MAX_TOKEN_BYTES:
            raise _error(path, number, f"has a token of {len(token)} bytes")
        tokens.append(token)
    known = set(tokens)
    if len(known) != len(tokens):
        raise TokenizerError(f"tokenizer file {path} has a token twice")
    if missing := [byte for byte in range(256) if bytes([byte]) not in known]:
        raise TokenizerError(
            f"tokenizer file {path} is cut short or damaged: it has no token for the byte {missing[0]}"
        )
    return tokens


def _error(path: Path, number: int, problem: str) -> TokenizerError:
    return TokenizerError(f"tokenizer file {path}: line {number} {problem}")
