"""vLLM's `prompt_logprobs`: for each token of a prompt but the first, the token and the likeliest ones, by id."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from deployments.openai.answers.logprobs import LOWEST, SLICE_ENTRIES, names_of
from llama_core.scheduling.request import TokenLogprob
from llama_core.text.tokenizers.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
Entry = dict[str, dict[str, Any]]


class PromptLogprobs:
    """Of one prompt, written once for all its choices."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int], num_top: int) -> None:
        self._names = names_of(cast(Any, tokenizer))
        self._tokens, self._num_top = tokens, num_top
        self._written = b""

    def slices(self, logprobs: Sequence[TokenLogprob]) -> Iterator[None]:
        """Write the list, one slice at a time; does nothing once it is written. logprobs: of the second token and on."""
        if self._written:
            return
        written = [b"[null"]
        num_tokens = max(1, SLICE_ENTRIES // (self._num_top + 1))
        for begin in range(0, len(logprobs), num_tokens):
            tokens = self._tokens[begin + 1 : begin + 1 + num_tokens]
            pairs = zip(tokens, logprobs[begin : begin + num_tokens], strict=True)
            written.append(b"," + _encode([self._entry(token, entry) for token, entry in pairs])[1:-1])
            yield
        self._written = b"".join([*written, b"]"])

    @property
    def written(self) -> bytes:
        """The list as JSON."""
        assert self._written, "`slices` has been read to its end"
        return self._written

    def _entry(self, token: int, entry: TokenLogprob) -> Entry:
        """The prompt's own token first, as in vLLM. Its rank is None where it is not among the alternatives of the request."""
        top = entry.top[: self._num_top]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        found = {str(token): self._item(token, entry.logprob, ranks.get(token))}
        for rank, (token_id, logprob) in enumerate(top, 1):
            found.setdefault(str(token_id), self._item(token_id, logprob, rank))
        return found

    def _item(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": self._names[token]}
