"""What the choices of one prompt share in an answer, written once."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from deployments.openai.answers.logprobs import Fragments, LogprobsWriter
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
