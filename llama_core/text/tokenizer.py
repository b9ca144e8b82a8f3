"""The Protocol of a tokenizer: text to token ids and back. `registry.load_tokenizer` finds the class for a file.

Knows nothing of chats, streams or models.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

# What decoding does with the spaces that begin a text.
LeadingSpace = Literal["keep", "drop_one", "drop_all"]


class Tokenizer(Protocol):
    """Immutable after construction; safe to share between threads. Every token id is in [0, n_words).

    A method that takes an id raises InvalidParameter for any other value.
    """

    @property
    def n_words(self) -> int:
        """Number of token ids."""

    @property
    def bos_id(self) -> int: ...

    @property
    def eos_id(self) -> int:
        """The id that `encode(..., eos=True)` appends."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generation. `eos_id` is one of them."""

    @property
    def leading_space(self) -> LeadingSpace:
        """What `decode` does with the spaces that begin a text. See `leads_with_space`."""

    def min_tokens(self, num_chars: int) -> int:
        """The fewest tokens that any text of `num_chars` characters can take, to refuse a long text without encoding it.

        0 if the tokenizer may shorten text before it encodes.
        """

    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]:
        """Token ids of `s`. Text never becomes a control token. Raises InvalidRequest for a lone surrogate."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Each byte that is not part of a UTF-8 character becomes one U+FFFD."""

    def token_text(self, token_id: int) -> str:
        """`decode` of one id: the `tokens` field of the reference's results."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the id adds to a text that has begun, its leading space included; b"" for a control token."""

    def token_name(self, token_id: int) -> str:
        """The id as log-probabilities show it: its text, a control token's name, or `name_of_bytes` of part of a character."""

    def leads_with_space(self, token_id: int) -> bool:
        """Whether the id's bytes begin with a space that `decode` may drop where a text begins (`leading_space`)."""

    def is_control(self, token_id: int) -> bool:
        """Whether the id has no text: BOS, EOS and whatever else the model declares as control."""


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
