"""Log-probabilities in the formats of OpenAI's two routes.

Numbers pass through unchanged: clients compare the chosen token's with the largest by equality.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self, cast

import msgspec

from llama_core.scheduling.request import TokenLogprob
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity
SLICE_ENTRIES = 4096  # log-probabilities, alternatives included, that are written in one slice: about 5 ms
CONTEXT_TOKENS = 256  # the last tokens of a prompt: they decide the first characters of the text after it

Json = dict[str, object]
Fragments = tuple[bytes, ...]  # the items of each of an object's lists as JSON, without the brackets
_encode = msgspec.json.Encoder().encode


class TokenNames(dict[int, str]):
    """Names of tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        name = self[token_id] = self._tokenizer.token_name(token_id)
        return name


class TokenIdNames(dict[int, str]):
    """What vLLM writes for `return_tokens_as_token_ids`."""

    def __missing__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


@lru_cache(maxsize=1)
def names_of(tokenizer: Any) -> TokenNames:
    return TokenNames(tokenizer)


class LogprobsWriter(ABC):
    """Writes the log-probabilities of one choice, one part for each delta of its stream."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, names_ids: bool = False) -> None:
        """names_ids: a token's name is its id."""
        self._tokenizer = tokenizer
        self._names = TokenIdNames() if names_ids else names_of(cast(Hashable, tokenizer))
        self._num_top = num_top

    def copy(self) -> Self:
        """A writer for another choice, in the same state."""
        return copy.copy(self)

    def slices(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> Iterator[tuple[Sequence[int], Sequence[TokenLogprob | None]]]:
        """Tokens with their log-probabilities, in pieces for one `take` each."""
        num_tokens = max(1, SLICE_ENTRIES // (self._num_top + 1))
        for begin in range(0, len(tokens), num_tokens):
            yield tokens[begin : begin + num_tokens], logprobs[begin : begin + num_tokens]

    @abstractmethod
    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Fragments:
        """`logprobs`: one for each token; None for the first token of a prompt, which has none."""

    @abstractmethod
    def written(self, parts: Sequence[Fragments]) -> bytes:
        """The JSON object of consecutive parts, joined."""


class CompletionLogprobs(LogprobsWriter):
    """{tokens, token_logprobs, top_logprobs, text_offset}: four lists of one length."""

    fields: ClassVar = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, tokenizer: Tokenizer, num_top: int, before: Sequence[int], *, names_ids: bool = False) -> None:
        """before: the prompt; empty where it is echoed, because `take` then gets it too."""
        super().__init__(tokenizer, num_top, names_ids=names_ids)
        self._detokenizer = IncrementalDetokenizer(tokenizer, prefix=before[-CONTEXT_TOKENS:])
        self._offset = 0

    def copy(self) -> Self:
        copied = super().copy()
        copied._detokenizer = copy.copy(self._detokenizer)
        return copied

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Fragments:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        lists: tuple[object, ...] = (
            [self._names[token] for token in tokens],
            [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            [None if entry is None else self._top(token, entry) for token, entry in zip(tokens, logprobs, strict=True)],
            offsets,
        )
        return tuple(_encode(items)[1:-1] for items in lists)

    def written(self, parts: Sequence[Fragments]) -> bytes:
        lists = [
            b'"%s":[%s]' % (name.encode(), _joined(part[i] for part in parts)) for i, name in enumerate(self.fields)
        ]
        return b"{" + b",".join(lists) + b"}"

    def _top(self, token: int, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives, most likely first, the chosen token included. Of two ids with the same text the likelier counts."""
        top: dict[str, float] = {}
        names = self._names
        for token_id, logprob in [*entry.top[: self._num_top], (token, entry.logprob)]:
            top.setdefault(names[token_id], _finite(logprob))
        return top


class ChatLogprobs(LogprobsWriter):
    """{content: [{token, bytes, logprob, top_logprobs}]}."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Fragments:
        content: list[Json] = []
        for token, entry in zip(tokens, logprobs, strict=True):
            assert entry is not None, "every generated token has its logprob"
            top = [self._token(*pair) for pair in entry.top[: self._num_top]]
            content.append({**self._token(token, entry.logprob), "top_logprobs": top})
        return (_encode(content)[1:-1],)

    def written(self, parts: Sequence[Fragments]) -> bytes:
        return b'{"content":[%s],"refusal":null}' % _joined(part[0] for part in parts)

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = list(self._tokenizer.token_bytes(token_id))
        return {"token": self._names[token_id], "bytes": raw, "logprob": _finite(logprob)}


def _joined(fragments: Iterator[bytes]) -> bytes:
    return b",".join(fragment for fragment in fragments if fragment)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
