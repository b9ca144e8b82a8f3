"""Log-probabilities as OpenAI's two routes write them.

Numbers pass through unchanged: clients compare the chosen token's with the largest by equality.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest

from llama_core.scheduling.request import TokenLogprob
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity

Json = dict[str, object]


class CompletionLogprobs:
    """One choice's {tokens, token_logprobs, top_logprobs, text_offset}, in as many parts as its stream has."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, before: Sequence[int]) -> None:
        """before: the prompt; empty where it is echoed, since it then comes through `take` like the rest."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = IncrementalDetokenizer(tokenizer, prefix=before)
        self._offset = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Json:
        """logprobs: one for each token; None for the first of a prompt, which nothing predicted."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
        pairs = list(zip_longest(tokens, logprobs))
        return {
            "tokens": [self._tokenizer.token_name(token) for token in tokens],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in pairs],
            "top_logprobs": [None if entry is None else self._top(token, entry) for token, entry in pairs],
            "text_offset": offsets,
        }

    def _top(self, token: int, entry: TokenLogprob) -> dict[str, float]:
        """Most likely first; of two ids with the same text the likelier counts; the chosen one is always there."""
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self._num_top], (token, entry.logprob)]:
            top.setdefault(self._tokenizer.token_name(token_id), _finite(logprob))
        return top


class ChatLogprobs:
    """One choice's {content: [{token, bytes, logprob, top_logprobs}]}."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Json:
        content: list[Json] = []
        for token, entry in zip(tokens, logprobs, strict=True):
            assert entry is not None, "every generated token has its logprob"
            top = [self._token(*pair) for pair in entry.top[: self._num_top]]
            content.append({**self._token(token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = list(self._tokenizer.token_bytes(token_id))
        return {"token": self._tokenizer.token_name(token_id), "bytes": raw, "logprob": _finite(logprob)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
