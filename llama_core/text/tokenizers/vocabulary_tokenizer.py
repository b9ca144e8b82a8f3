"""What tokenizers of every library share: the table of ids, control tokens in a text, and decoding.

A subclass encodes plain text (`_encode_plain`). This module decides which part of a text becomes a control token.
"""

import logging
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from llama_core.errors import InvalidParameter, InvalidRequest, SpecialTags
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.tokenizers.tokenizer import (
    ByteDecoding,
    LeadingSpace,
    TextPart,
    Tokenizer,
    is_encodable,
    name_of_bytes,
)

log = logging.getLogger(__name__)

# Control tokens of these names end a message or a text in every family that has them.
END_NAMES: Final = frozenset(
    {"</s>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|eot|>", "<|eom|>",
     "<|end_of_turn|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|EOT|>", "<|end|>"}
)  # fmt: skip
_HARMONY_ENDS: Final = frozenset({"<|return|>", "<|call|>"})


_TURN_MARK: Final = re.compile(r"<\|[^<>]+\|>|<｜[^<>]+｜>")


def end_names(names: Collection[str]) -> frozenset[str]:
    """Those of a vocabulary's control tokens that end an answer. In gpt-oss's, <|end|> ends one message of several."""
    ends = END_NAMES - {"<|end|>"} | _HARMONY_ENDS if _HARMONY_ENDS.issubset(names) else END_NAMES
    return ends & frozenset(names)


def is_control_name(name: str) -> bool:
    """Whether an added token of this name is a control token in every family, whatever the files say of it."""
    return name in END_NAMES or _TURN_MARK.fullmatch(name) is not None


def warn_left_out(path: Path, names: Sequence[str], num_rows: int) -> None:
    """Logs the added tokens that have no row in the model, so that no text becomes one of them."""
    if names:
        shown = ", ".join(repr(name[:40]) for name in names[:5]) + (", ..." if len(names) > 5 else "")
        log.warning("%s: %d added tokens past the model's %d rows are left out: %s", path, len(names), num_rows, shown)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """raws: for each id, the UTF-8 bytes that it adds to a text; b"" for control tokens and ids that stand for nothing.

    control_texts: name and id of each control token. stop_ids: beside `eos_id` and the control tokens in `end_names`.
    unknown_id: the control token that stands for characters which the vocabulary lacks, if it lacks any.
    """

    raws: Sequence[bytes]
    control_texts: Mapping[str, int]
    bos_id: int | None
    eos_id: int
    adds_bos: bool
    stop_ids: frozenset[int] = frozenset()
    unknown_id: int | None = None
    appended: tuple[int, ...] = ()


class ControlToken(NamedTuple):
    """What a control token takes of the text around its name: white space to its left, to its right."""

    token_id: int
    strips_left: bool = False
    strips_right: bool = False


class VocabularyTokenizer(Tokenizer):
    """A Tokenizer over a Vocabulary. Immutable after construction."""

    leading_space: LeadingSpace = "keep"
    byte_decoding: ByteDecoding = "byte_level"

    def __init__(
        self,
        vocabulary: Vocabulary,
        control_tokens: Mapping[str, ControlToken] | None = None,
        user_tokens: Mapping[str, ControlToken] | None = None,
    ) -> None:
        """control_tokens: by name; default `vocabulary.control_texts` without any white space. user_tokens: the added tokens
        that have text, which a template may reserve (`for_template`)."""
        self._vocabulary = vocabulary
        self._raws = vocabulary.raws
        self.n_words = self.vocab_size = len(vocabulary.raws)
        self.bos_id, self.eos_id, self.control_texts = vocabulary.bos_id, vocabulary.eos_id, vocabulary.control_texts
        self.adds_bos = vocabulary.adds_bos and vocabulary.bos_id is not None
        self.appended = vocabulary.appended
        self._control_names = {token_id: text for text, token_id in vocabulary.control_texts.items()}
        ends = {vocabulary.control_texts[name] for name in end_names(vocabulary.control_texts)}
        self.stop_ids = vocabulary.stop_ids | ends | {vocabulary.eos_id}
        if control_tokens is None:
            control_tokens = {text: ControlToken(token_id) for text, token_id in vocabulary.control_texts.items()}
        self._user_tokens = user_tokens or {}
        self._keep_from_text(control_tokens)
        self._max_token_chars = max(
            max(map(len, self._raws), default=1), max(map(len, vocabulary.control_texts), default=1), 1
        )

    def _keep_from_text(self, tokens: Mapping[str, ControlToken]) -> None:
        """Only text that parses control tokens becomes one of `tokens`."""
        self._control_tokens = tokens
        self._spelled_names = {token.token_id: name for name, token in tokens.items()}
        # Where a stop token stands for unknown characters, they are dropped: a text must not end a turn.
        harmless = {self._vocabulary.unknown_id} - self.stop_ids - {self.bos_id}
        self._never_from_text = (self._control_names.keys() | self._spelled_names.keys()) - harmless
        self._control_pattern = name_pattern(tokens)

    def for_template(self, literals: str) -> Self:
        reserved = {name: token for name, token in self._user_tokens.items() if _is_mark(name) and name in literals}
        if reserved.keys() <= self._control_tokens.keys():
            return self
        other = self._copy()
        other._keep_from_text({**self._control_tokens, **reserved})
        return other

    def _copy(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def padded(self, vocab_size: int) -> Self:
        if vocab_size < self.n_words:
            raise InvalidParameter(f"vocab_size {vocab_size} is less than the tokenizer's {self.n_words} tokens")
        other = self._copy()
        other.vocab_size = vocab_size
        return other

    def min_tokens(self, num_chars: int) -> int:
        """The text is not shorter in UTF-8, and no token has more bytes than the longest."""
        return -(-num_chars // self._max_token_chars)

    # Encoding

    @abstractmethod
    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        """Token ids of a text without control tokens. is_first: it begins the prompt."""

    def _spell(self, token_id: int) -> list[int]:
        """Ids of the characters of a control token's name, for text that must not become it."""
        raise SpecialTags("text contains a control token of the tokenizer")

    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]:
        check_encodable(s)
        ids = self._encode_safely(s, is_first=True)
        if bos and self.adds_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids

    def encode_special(self, s: str, *, bos: bool = False) -> list[int]:
        check_encodable(s)
        ids = self._parse([TextPart(s, True)])
        return self._with_bos(ids) if bos else ids

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        check_encodable("".join(part.text for part in parts))
        return self._parse(parts)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _encode_safely(self, text: str, is_first: bool) -> list[int]:
        """`_encode_plain`, whose vocabulary may spell a control token's name out of smaller tokens."""
        ids = self._encode_plain(text, is_first) if text else []
        if self._never_from_text.isdisjoint(ids):
            return ids
        return [each for token_id in ids for each in self._harmless(token_id)]

    def _harmless(self, token_id: int) -> list[int]:
        if token_id not in self._never_from_text:
            return [token_id]
        return [] if token_id == self._vocabulary.unknown_id else self._spell(token_id)

    def _parse(self, parts: Sequence[TextPart]) -> list[int]:
        ids: list[int] = []
        is_first = True
        for text, control in self._runs(parts):
            ids += self._encode_safely(text, is_first)
            is_first = is_first and not text
            if control is not None:
                ids.append(control.token_id)
                is_first = self._begins_after_control
        return ids

    # Whether plain text after a control token is encoded as text that begins a prompt.
    _begins_after_control = True

    def _runs(self, parts: Sequence[TextPart]) -> Iterator[tuple[str, ControlToken | None]]:
        """Plain texts, each with the control token that ends it; the last with None."""
        held: list[str] = []
        strips = False
        for part in parts:
            at = 0
            for match in self._control_pattern.finditer(part.text) if part.parses_control else ():
                control = self._control_tokens[match[0]]
                text = "".join([*held, part.text[at : match.start()]])
                text = text.lstrip() if strips else text
                yield text.rstrip() if control.strips_left else text, control
                held, strips, at = [], control.strips_right, match.end()
            held.append(part.text[at:])
        text = "".join(held)
        yield text.lstrip() if strips else text, None

    # Decoding

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        if type(token_id) is int and 0 <= token_id < len(self._raws):
            return self._raws[token_id]
        self._check(token_id)
        return b""

    def token_name(self, token_id: int) -> str:
        raw = self.token_bytes(token_id)
        return name_of_bytes(raw) if raw else self._control_names.get(token_id, f"<unused-{token_id}>")

    def control_text(self, token_id: int) -> str:
        self._check(token_id)
        return self._control_names.get(token_id, "")

    def leads_with_space(self, token_id: int) -> bool:
        return self.token_bytes(token_id).startswith(b" ")

    def is_control(self, token_id: int) -> bool:
        return not self.token_bytes(token_id)

    def _check(self, token_id: int) -> None:
        if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
            raise InvalidParameter(f"a token id must be an integer from 0 to {self.vocab_size - 1}", param="tokens")


def name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Finds each of `names`, the longest first."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _is_mark(name: str) -> bool:
    """Whether a user's text hardly has this name by chance: letters and some sign, such as [INST] or <think>."""
    return any(map(str.isalpha, name)) and not all(char.isalnum() or char.isspace() for char in name)


def check_encodable(s: str) -> None:
    """Raises InvalidRequest for a lone surrogate, which is no character."""
    if not is_encodable(s):
        raise InvalidRequest("text contains a lone surrogate, which is not a character")
