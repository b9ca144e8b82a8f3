"""Log-probabilities in the formats of OpenAI's two routes.

Numbers pass through unchanged: clients compare the chosen token's with the largest by equality.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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


@dataclass(eq=False)
class PromptShare:
    """Shared by the choices of one prompt: the echoed text, and what is written of its log-probabilities. own_writer: where the
    request asks for them."""

    tokenizer: Tokenizer
    tokens: Sequence[int]
    skip_special_tokens: bool
    own_writer: LogprobsWriter | None
    echoed: list[Fragments] = field(default_factory=list)
    is_echoed: bool = False

    @cached_property
    def text(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=self.skip_special_tokens)

    @property
    def writer(self) -> LogprobsWriter:
        """In its state after the prompt; each choice has a copy."""
        assert self.own_writer is not None, "the request asks for log-probabilities"
        return self.own_writer

    def echo_logprobs(self, logprobs: Sequence[TokenLogprob]) -> Iterator[Fragments]:
        """The prompt's own log-probabilities, one slice at a time; they are written for the first choice that asks."""
        if self.is_echoed:
            yield from self.echoed
            return
        self.echoed.clear()
        for tokens, entries in self.writer.slices(self.tokens, [None, *logprobs]):
            self.echoed.append(self.writer.take(tokens, entries))
            yield self.echoed[-1]
        self.is_echoed = True


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each token of a prompt but the first, the token and the likeliest ones, by id."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int], num_top: int) -> None:
        self._names = names_of(cast(Any, tokenizer))
        self._tokens, self._num_top = tokens, num_top
        self._written = b""

    def slices(self, logprobs: Sequence[TokenLogprob]) -> Iterator[None]:
        """Write the list, one slice at a time. logprobs: of the second token and on."""
        written = [b"[null"]
        num_tokens = max(1, SLICE_ENTRIES // (self._num_top + 1))
        for begin in range(0, len(logprobs), num_tokens):
            tokens = self._tokens[begin + 1 : begin + 1 + num_tokens]
            pairs = zip(tokens, logprobs[begin : begin + num_tokens], strict=True)
            written.append(b"," + msgspec.json.encode([self._entry(token, entry) for token, entry in pairs])[1:-1])
            yield
        self._written = b"".join([*written, b"]"])

    @property
    def written(self) -> bytes:
        """The list as JSON."""
        assert self._written, "`slices` has been read to its end"
        return self._written

    def _entry(self, token: int, entry: TokenLogprob) -> dict[str, dict[str, Any]]:
        """The prompt's own token first, as in vLLM. Its rank is None where it is not among the alternatives of the request."""
        top = entry.top[: self._num_top]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        found = {str(token): self._item(token, entry.logprob, ranks.get(token))}
        for rank, (token_id, logprob) in enumerate(top, 1):
            found.setdefault(str(token_id), self._item(token_id, logprob, rank))
        return found

    def _item(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": self._names[token]}
