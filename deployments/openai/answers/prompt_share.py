"""What the choices of one prompt share in an answer, written once."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import msgspec

from deployments.openai.answers.logprobs import LOWEST, SLICE_ENTRIES, Fragments, LogprobsWriter, names_of
from llama_core.scheduling.request import TokenLogprob
from llama_core.text.tokenizers.tokenizer import Tokenizer


class PromptShare:
    """Shared by the choices of one prompt: the echoed text, and the log-probabilities' writer in its state after the prompt."""

    def __init__(
        self, tokenizer: Tokenizer, tokens: Sequence[int], writer: LogprobsWriter | None, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._writer = writer
        self._skip_special_tokens = skip_special_tokens
        self._echoed: list[Fragments] = []
        self._is_echoed = False

    @cached_property
    def text(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip_special_tokens)

    def echo_logprobs(self, logprobs: Sequence[TokenLogprob]) -> Iterator[Fragments]:
        """The prompt's own log-probabilities, one slice at a time; they are written for the first choice that asks."""
        if not self._is_echoed:
            assert self._writer is not None, "the request asks for log-probabilities"
            self._echoed.clear()
            for tokens, entries in self._writer.slices(self._tokens, [None, *logprobs]):
                self._echoed.append(self._writer.take(tokens, entries))
                yield self._echoed[-1]
            self._is_echoed = True
        else:
            yield from self._echoed

    def writer(self) -> LogprobsWriter:
        """A writer for the tokens that one choice adds."""
        assert self._writer is not None, "the request asks for log-probabilities"
        return self._writer.copy()

    def logprobs_object(self, fragments: Sequence[Fragments]) -> bytes:
        """The JSON object of consecutive fragments of one choice, joined."""
        assert self._writer is not None, "the request asks for log-probabilities"
        return self._writer.written(fragments)


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
