"""The Protocol of a tokenizer: text to token ids and back. `registry.load_tokenizer` finds the class for a path.

Knows nothing of chats, streams or models.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

# What decoding does with the spaces that begin a text. "drop_first_token": with every space of the first token.
LeadingSpace = Literal["keep", "drop_one", "drop_all", "drop_first_token"]
# How bytes that are not UTF-8 become U+FFFD, and whether a control token ends an incomplete character.
#   sentencepiece: one for each byte; a control token ends the character
#   byte_fallback: one for each byte; a control token is skipped
#   byte_level: one for each longest beginning of a character, as bytes.decode(errors="replace"); a control token is skipped
ByteDecoding = Literal["sentencepiece", "byte_fallback", "byte_level"]


class TextPart(NamedTuple):
    """A part of a prompt. `parses_control`: names of control tokens in it become control tokens."""

    text: str
    parses_control: bool


class Tokenizer(Protocol):
    """Immutable after construction; safe to share between threads. Every token id is in [0, n_words).

    A method that takes an id raises InvalidParameter for any value outside [0, vocab_size).
    """

    n_words: int  # number of token ids
    vocab_size: (
        int  # ids that a model may sample, at least `n_words`; ids from `n_words` on are padding: they have no text
    )
    bos_id: int | None  # begins a text; None for a family without one
    adds_bos: bool  # whether `encode(..., bos=True)` begins with `bos_id`, as its own library does; False without one
    eos_id: int  # what `encode(..., eos=True)` appends
    appended: tuple[int, ...]  # ends a text that is embedded, as its own library has it; () for most
    stop_ids: frozenset[int]  # end a generation; `eos_id` is one of them
    control_texts: Mapping[str, int]  # the name of every control token, such as "<|eot_id|>", and its id
    leading_space: LeadingSpace  # what `decode` does with the spaces that begin a text, see `leads_with_space`
    byte_decoding: ByteDecoding  # what `decode` does with bytes that are not UTF-8

    def padded(self, vocab_size: int) -> "Tokenizer":
        """The same tokenizer for a model with `vocab_size` ids, which must not be fewer than `n_words`."""

    def for_template(self, literals: str) -> "Tokenizer":
        """The same tokenizer for a chat template with these literals: added tokens named in them, such as <think>, become ids
        only where control tokens do. They keep their text."""

    def min_tokens(self, num_chars: int) -> int:
        """The fewest tokens that any text of `num_chars` characters can take, to refuse a long text without encoding it.

        0 if the tokenizer may shorten text before it encodes.
        """

    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]:
        """Token ids of `s`. Text never becomes a control token. Raises InvalidRequest for a lone surrogate."""

    def encode_special(self, s: str, *, bos: bool = False) -> list[int]:
        """Token ids of `s`, whose names of control tokens become control tokens. Without EOS.

        `bos`: begin with BOS where `encode` would, unless `s` begins with it. Raises InvalidRequest for a lone surrogate.
        """

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        """Token ids of the joined text of `parts`. Only names within a part that `parses_control` become control tokens.

        Equals `encode_special` of the joined text if no other part takes part in a control token's name. Without BOS and EOS.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, without control tokens, or with their names. Bytes that are not UTF-8 become U+FFFD."""

    def token_text(self, token_id: int) -> str:
        """`decode` of one id: the `tokens` field of the reference's results."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the id adds to a text that has begun, its leading space included; b"" for a control token."""

    def token_name(self, token_id: int) -> str:
        """The id as log-probabilities show it: its text, a control token's name, or `name_of_bytes` of part of a character."""

    def control_text(self, token_id: int) -> str:
        """The name of a control token; "" for any other id."""

    def leads_with_space(self, token_id: int) -> bool:
        """Whether the id's bytes begin with a space that `decode` may drop where a text begins (`leading_space`)."""

    def is_control(self, token_id: int) -> bool:
        """Whether the id has no text: BOS, EOS, whatever else the model declares as control, and padding."""


def is_encodable(s: str) -> bool:
    """Whether `s` has no lone surrogates (JSON can carry them, UTF-8 cannot)."""
    try:
        s.encode()
    except UnicodeEncodeError:
        return False
    return True


def name_of_bytes(raw: bytes) -> str:
    """`raw` as text, or as "bytes:\\xf0\\x9f" if it is not whole UTF-8 characters. OpenAI's clients read this form."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def spellings(words: Collection[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that write each word: at the beginning of a text, after a space, and inside a line."""
    found: dict[tuple[int, ...], None] = {}
    if not words:
        return ()
    newline = tokenizer.encode("\n", bos=False, eos=False)
    for word in words:
        after_newline = tokenizer.encode("\n" + word, bos=False, eos=False)
        for ids in (
            tokenizer.encode(word, bos=False, eos=False),
            tokenizer.encode(" " + word, bos=False, eos=False),
            after_newline[len(newline) :] if after_newline[: len(newline)] == newline else [],
        ):
            if ids:
                found[tuple(ids)] = None
    return tuple(found)
