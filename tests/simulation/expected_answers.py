"""What an answer may be, computed outside of the product."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_core.scheduling.sampling_params import SamplingParams, params_of_choices
from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.simulation.processes import salt
from tests.support.fake_ranks import EOS, adapted, arbitrary
from tests.support.joined_events import data_of, id_of


class Wrong(Exception):
    """A rule does not hold."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What computes an answer: one version of the weights, and an adapter's digest."""

    weights: int
    adapter: str = ""

    def next(self, tokens: list[int], seed: int) -> int:
        return arbitrary(tokens, adapted(seed, self.adapter) + salt(self.weights))


@dataclass
class Choice:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_logprobs: int = 0

    def add(self, shown: dict[str, Any], prompt_len: int) -> None:
        """One event's, or those of a whole answer."""
        self.tokens += shown.get("token_ids") or ()
        self.text += shown.get("text") or (shown.get("delta") or shown.get("message") or {}).get("content") or ""
        self.finish_reason = shown.get("finish_reason") or self.finish_reason
        for logprob in (shown.get("logprobs") or {}).get("token_logprobs") or ():
            if logprob != float(prompt_len + self.num_logprobs):
                raise Wrong(f"the log-probability of token {self.num_logprobs} is {logprob}")
            self.num_logprobs += 1


class Answer:
    """Collects what a client reads of one request, and compares it with all that the request may be answered."""

    def __init__(self, n: int, prompt: list[int] | None) -> None:
        """prompt: None where the answer's first event has it."""
        self.choices = [Choice() for _ in range(n)]
        self.prompt = prompt
        self.last_id = ""
        self.is_done = False
        self.error: dict[str, Any] | None = None
        self.num_completion: int | None = None  # tokens, as the answer tells

    def read(self, events: Iterable[bytes]) -> None:
        for event in events:
            self.last_id = id_of(event) or self.last_id
            if (data := data_of(event)) == "[DONE]":
                self.is_done = True
            else:
                self.read_body(json.loads(data))

    def read_body(self, body: dict[str, Any]) -> None:
        self.error = body.get("error") or self.error
        if (usage := body.get("usage")) is not None:
            self.num_completion = usage["completion_tokens"]
        if (prompt := body.get("prompt_token_ids")) is not None:
            self.prompt = prompt
        for shown in body.get("choices", ()):
            if (prompt := shown.get("prompt_token_ids")) is not None:
                self.prompt = prompt
            self.choices[shown["index"]].add(shown, len(self.prompt or ()))

    def check(
        self, params: SamplingParams, origins: Sequence[Origin], tokenizer: Tokenizer, stop: str, *, is_whole: bool
    ) -> None:
        """params: of the first choice. is_whole: it has ended."""
        if not any(choice.tokens for choice in self.choices) and not is_whole:
            return
        assert self.prompt is not None, "the first event has the prompt"
        own = list(params_of_choices(params, len(self.choices)))
        for choice, each in zip(self.choices, own, strict=True):  # an engine of another version may compute each
            left = [origin for origin in origins if self._is_of(origin, choice, each)]
            if not left:
                raise Wrong(f"no version gives {choice.tokens} after {self.prompt}")
            if is_whole:
                self._check_end(choice, each, left, tokenizer, stop)
        if not is_whole:
            return
        num_tokens = sum(len(choice.tokens) for choice in self.choices)
        if self.num_completion not in (None, num_tokens):
            raise Wrong(f"usage tells {self.num_completion} tokens, and there are {num_tokens}")
        if params.logprobs is not None and any(choice.num_logprobs != len(choice.tokens) for choice in self.choices):
            raise Wrong("a token without a log-probability")

    def _is_of(self, origin: Origin, choice: Choice, params: SamplingParams) -> bool:
        tokens = list(self.prompt or ())
        for token in choice.tokens:
            if origin.next(tokens, params.seed) != token:
                return False
            tokens.append(token)
        return True

    def _check_end(
        self, choice: Choice, params: SamplingParams, origins: Sequence[Origin], tokenizer: Tokenizer, stop: str
    ) -> None:
        tokens = [*(self.prompt or ()), *choice.tokens]
        is_eos = any(origin.next(tokens, params.seed) == EOS for origin in origins)
        is_stop = bool(stop) and stop in tokenizer.decode(choice.tokens)
        is_full = len(choice.tokens) == params.max_tokens
        expected = "stop" if is_stop or (is_eos and not is_full) else "length" if is_full else None
        if choice.finish_reason != expected:
            raise Wrong(f"ended by {choice.finish_reason} instead of {expected} after {len(choice.tokens)} tokens")
        text = tokenizer.decode(choice.tokens)
        whole = text.partition(stop)[0] if stop else text
        if choice.text not in (whole, " " + whole):  # a text alone begins without its first space
            raise Wrong(f"the text is {choice.text!r} instead of {text!r}, with the stop string {stop!r}")
