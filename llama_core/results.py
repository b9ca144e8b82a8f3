"""The reference's arguments and result dictionaries, for the in-process API (`generation`) and the API by Ray handle."""

import itertools
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TypedDict

from llama_core.errors import InvalidParameter, SpecialTags
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams, whole_number
from llama_core.text.chat_format import SAFE_RESPONSE, Dialog, Message
from llama_core.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The result of `generate`: each prompt's tokens and, if requested, their logprobs.
Generated = tuple[list[list[int]], list[list[float]] | None]


class CompletionPrediction(TypedDict, total=False):
    generation: str
    tokens: list[str]  # each id decoded alone; with logprobs only
    logprobs: list[float]


class ChatPrediction(TypedDict, total=False):
    generation: Message
    tokens: list[str]
    logprobs: list[float]


def generation_result(sequences: Seq[Sequence], logprobs: bool, echo: bool) -> Generated:
    """The result of `generate` for finished sequences. The log-probability of an echoed prompt's first token is 0.0."""
    tokens = [seq.tokens if echo else seq.output for seq in sequences]
    if not logprobs:
        return tokens, None
    return tokens, [
        ([0.0, *(p.logprob for p in seq.prompt_logprobs)] if echo else []) + [p.logprob for p in seq.logprobs]
        for seq in sequences
    ]


def generation_params(
    max_gen_len: int,
    temperature: float,
    top_p: float,
    logprobs: bool = False,
    echo: bool = False,
    *,
    top_k: int,
    seed: int,
) -> SamplingParams:
    """The reference's arguments as sampling parameters. Raises InvalidParameter that names the argument."""
    max_gen_len = whole_number("max_gen_len", max_gen_len)
    if max_gen_len < 0:
        raise InvalidParameter("max_gen_len must be at least 0", param="max_gen_len")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_gen_len,
        logprobs=0 if logprobs else None,
        prompt_logprobs=logprobs and echo,
    )


def completion_predictions(tokenizer: Tokenizer, generated: Generated) -> list[CompletionPrediction]:
    """The result of `text_completion`."""
    predictions = []
    for tokens, logprobs in _pairs(generated):
        prediction = CompletionPrediction(generation=tokenizer.decode(tokens))
        if logprobs is not None:
            prediction["tokens"] = [tokenizer.token_text(token) for token in tokens]
            prediction["logprobs"] = logprobs
        predictions.append(prediction)
    return predictions


class DialogBatch:
    """The dialogs of one `chat_completion` call. A dialog with the chat template's own tags is refused as the reference does;
    `prompts` are the token ids of the others.
    """

    def __init__(self, dialogs: Seq[Dialog], encode: Callable[[Dialog], list[int]]) -> None:
        """Raises InvalidDialog."""
        self.prompts: list[list[int]] = []
        self._is_refused: list[bool] = []
        for i, dialog in enumerate(dialogs):
            try:
                self.prompts.append(encode(dialog))
                self._is_refused.append(False)
            except SpecialTags:
                log.info("dialog %d contains special tags and is refused", i)
                self._is_refused.append(True)

    def predictions(self, tokenizer: Tokenizer, generated: Generated) -> list[ChatPrediction]:
        """The result of `chat_completion` from the generations of `prompts`: one for each dialog, in their order."""
        answers = _pairs(generated)
        wants_logprobs = generated[1] is not None
        predictions = []
        for is_refused in self._is_refused:
            tokens, logprobs = ([], [] if wants_logprobs else None) if is_refused else next(answers)
            content = SAFE_RESPONSE if is_refused else tokenizer.decode(tokens)
            prediction = ChatPrediction(generation=Message(role="assistant", content=content))
            if logprobs is not None:
                prediction["tokens"] = [tokenizer.token_text(token) for token in tokens]
                prediction["logprobs"] = logprobs
            predictions.append(prediction)
        return predictions


def _pairs(generated: Generated) -> Iterator[tuple[list[int], list[float] | None]]:
    """Each generation's tokens with its logprobs, None without."""
    tokens, logprobs = generated
    return zip(tokens, logprobs if logprobs is not None else itertools.repeat(None), strict=False)
