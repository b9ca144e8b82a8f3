"""Builds the reference's result dictionaries from tokens, for the in-process API and for the Ray handle."""

from collections.abc import Sequence as Seq
from typing import TypedDict

from llama_core.scheduling.request import Sequence
from llama_core.text.chat_format import SAFE_RESPONSE, Message
from llama_core.text.tokenizer import Tokenizer


class CompletionPrediction(TypedDict, total=False):
    generation: str
    tokens: list[str]  # each id decoded alone; with logprobs only
    logprobs: list[float]


class ChatPrediction(TypedDict, total=False):
    generation: Message
    tokens: list[str]
    logprobs: list[float]


def generation_result(
    sequences: Seq[Sequence], logprobs: bool, echo: bool
) -> tuple[list[list[int]], list[list[float]] | None]:
    """What `generate` returns for finished sequences: tokens, and their log-probabilities if requested. The first token of an
    echoed prompt has 0.0."""
    tokens = [seq.tokens if echo else seq.output for seq in sequences]
    if not logprobs:
        return tokens, None
    return tokens, [
        ([0.0, *(p.logprob for p in seq.prompt_logprobs)] if echo else []) + [p.logprob for p in seq.logprobs]
        for seq in sequences
    ]


def completion_prediction(tokenizer: Tokenizer, tokens: Seq[int], logprobs: Seq[float] | None) -> CompletionPrediction:
    prediction = CompletionPrediction(generation=tokenizer.decode(tokens))
    if logprobs is not None:
        prediction["tokens"] = [tokenizer.token_text(token) for token in tokens]
        prediction["logprobs"] = list(logprobs)
    return prediction


def chat_prediction(tokenizer: Tokenizer, tokens: Seq[int], logprobs: Seq[float] | None) -> ChatPrediction:
    prediction = ChatPrediction(generation=Message(role="assistant", content=tokenizer.decode(tokens)))
    if logprobs is not None:
        prediction["tokens"] = [tokenizer.token_text(token) for token in tokens]
        prediction["logprobs"] = list(logprobs)
    return prediction


def refused_prediction(logprobs: bool) -> ChatPrediction:
    """The reference's answer to a dialog that contains the template's own tags, without any generation."""
    prediction = ChatPrediction(generation=Message(role="assistant", content=SAFE_RESPONSE))
    if logprobs:
        prediction["tokens"] = []
        prediction["logprobs"] = []
    return prediction
