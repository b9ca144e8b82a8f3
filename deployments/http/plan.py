"""Turns a checked body into what to generate: token ids, sampling parameters, and how the answer is to look.

Decides defaults, seeds and whether a prompt fits. Chat and completions meet here and are one from here on.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deployments.engine.interface import Engine
from deployments.http.errors import ModelNotFound, Unsupported
from deployments.http.limiter import Turns
from deployments.http.schemas import (
    CHAT_NEUTRAL,
    MAX_CHOICES,
    MESSAGE_NEUTRAL,
    NEUTRAL,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    refuse_unsupported,
)
from llama_core.errors import ContextLengthExceeded, InvalidParameter
from llama_core.scheduling.sampling_params import SLOT_FIELDS, SamplingParams, mix_seed
from llama_core.text.chat_llama2 import Message, encode_dialog, min_dialog_tokens
from llama_core.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat answer may fill the context
MAX_OWNER_CHARS = 64
INLINE_CHARS = 16_384  # longer texts are encoded in a thread (about 10 ms), so that streams go on meanwhile

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. Choice i of prompt p has index p * n + i; choice 0 has the request's own seed, as with n = 1."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one a prompt: where no limit was given it depends on the prompt's length
    n: int = 1
    stop: tuple[str, ...] = ()
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    owner: str = ""  # with whom it shares what there is
    priority: int = 0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def choices(self) -> Iterator[tuple[list[int], SamplingParams]]:
        for prompt, params in zip(self.prompts, self.params, strict=True):
            yield prompt, params
            for i in range(1, self.n):
                yield prompt, replace(params, seed=mix_seed(params.seed, i))


async def plan_completion(body: CompletionBody, raw: dict[str, Any], engine: Engine) -> Plan:
    """Raises InvalidRequest where the body contradicts itself, the vocabulary or the context."""
    check_model(body.model, engine)
    _check_shared(body, raw, engine, NEUTRAL)
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise InvalidParameter("best_of: must not be less than n", param="best_of")
    if body.best_of is not None and body.best_of > n:
        raise Unsupported("best_of: this server supports only best_of equal to n", param="best_of")
    if len(body.prompt) * n > MAX_CHOICES:
        raise InvalidParameter(f"n: prompts * n must be at most {MAX_CHOICES}", param="n")
    prompts = await _encode_prompts(body.prompt, body.add_special_tokens is not False, engine)
    limits = [_max_tokens(prompt, body.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt", engine) for prompt in prompts]
    return _plan(body, prompts, limits, engine, logprobs=body.logprobs, echo=bool(body.echo))


async def plan_chat(body: ChatBody, raw: dict[str, Any], engine: Engine) -> Plan:
    """Raises InvalidRequest as `plan_completion` does, and InvalidDialog or SpecialTags that name the message's index."""
    check_model(body.model, engine)
    _check_shared(body, raw, engine, CHAT_NEUTRAL)
    for index, message in enumerate(raw["messages"]):
        refuse_unsupported(message, MESSAGE_NEUTRAL, where=f"messages[{index}].")
    limit = body.max_completion_tokens or body.max_tokens
    if limit is not None and body.max_tokens not in (None, limit):
        message_ = "max_tokens: contradicts max_completion_tokens; they are the same limit, send one of them"
        raise InvalidParameter(message_, param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs: needs logprobs to be true", param="top_logprobs")
    prompt = await encode_messages(body.messages, engine)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limits = [_max_tokens(prompt, limit, engine.max_seq_len, "messages", engine)]
    return _plan(body, [prompt], limits, engine, logprobs=logprobs)


async def encode_messages(messages: Sequence[ChatMessage], engine: Engine) -> list[int]:
    """The chat template's ids. A dialog that cannot fit the context is refused before it is encoded."""
    dialog: list[Message] = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in messages
    ]
    _check_fits(min_dialog_tokens(engine.tokenizer, dialog), "messages", engine, at_least=True)
    num_chars = sum(len(m.content) for m in messages)
    return await encode_aside(num_chars, lambda: encode_dialog(engine.tokenizer, dialog))


async def encode_text(body: TokenizeBody, engine: Engine, turns: Turns) -> list[int]:
    """What POST /tokenize answers; a text may be longer than the context, because clients cut it themselves.

    Raises QueueFull where too many long ones wait for their turn.
    """
    if (body.prompt is None) == (not body.messages):
        raise InvalidParameter("prompt: send either prompt or messages", param="prompt")
    if body.prompt is None:
        return await encode_messages(body.messages, engine)
    text = body.prompt
    bos = body.add_special_tokens is not False
    return await encode_aside(len(text), lambda: engine.tokenizer.encode(text, bos=bos, eos=False), turns)


async def encode_aside(num_chars: int, encode: Callable[[], Result], turns: Turns | None = None) -> Result:
    """Runs `encode` here if it is quick, in a thread if not; SentencePiece lets go of the interpreter's lock.

    turns: which it then waits for, where no context bounds what there is to do.
    """
    if num_chars <= INLINE_CHARS:
        return encode()
    async with turns.one() if turns is not None else contextlib.nullcontext():
        return await asyncio.to_thread(encode)


def check_model(model: str | None, engine: Engine) -> None:
    if model is not None and model != engine.model_id:
        raise ModelNotFound(f"model: no such model here; the one served is '{engine.model_id}'", param="model")


def _check_shared(
    body: GenerationBody, raw: dict[str, Any], engine: Engine, neutral: dict[str, Callable[[object], bool]]
) -> None:
    vocab_size = engine.tokenizer.n_words
    if not all(0 <= token_id < vocab_size for token_id in body.logit_bias):
        raise InvalidParameter(f"logit_bias: token ids must be from 0 to {vocab_size - 1}", param="logit_bias")
    if body.min_tokens and body.max_tokens and body.min_tokens > body.max_tokens:
        raise InvalidParameter("min_tokens: must not be more than max_tokens", param="min_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options: needs stream to be true", param="stream_options")
    refuse_unsupported(raw, neutral)


async def _encode_prompts(prompts: list[str] | list[list[int]], bos: bool, engine: Engine) -> list[list[int]]:
    tokenizer, vocab_size = engine.tokenizer, engine.tokenizer.n_words
    encoded: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_fits(tokenizer.min_tokens(len(prompt)), "prompt", engine, at_least=True)
            ids = await encode_aside(len(prompt), _encoder(tokenizer, prompt, bos))
            if not ids:
                raise InvalidParameter("prompt: must not be empty when no BOS is added", param="prompt")
        else:
            ids = prompt
            _check_fits(len(ids), "prompt", engine)
            if not (min(ids) >= 0 and max(ids) < vocab_size):
                raise InvalidParameter(f"prompt: token ids must be from 0 to {vocab_size - 1}", param="prompt")
        encoded.append(ids)
    return encoded


def _encoder(tokenizer: Tokenizer, text: str, bos: bool) -> Callable[[], list[int]]:
    return lambda: tokenizer.encode(text, bos=bos, eos=False)


def _check_fits(num_tokens: int, param: str, engine: Engine, *, at_least: bool = False) -> None:
    """A prompt needs room for itself and one token more."""
    if num_tokens >= engine.max_seq_len:
        size = f"{'at least ' if at_least else ''}{num_tokens} tokens"
        raise ContextLengthExceeded(
            f"{param}: the context holds {engine.max_seq_len} tokens, one of them generated; the prompt has {size}",
            param=param,
        )


def _max_tokens(prompt: list[int], limit: int | None, default: int, param: str, engine: Engine) -> int:
    """The limit asked for, or the default as far as the context goes."""
    _check_fits(len(prompt), param, engine)
    if limit is None:
        return min(default, engine.max_seq_len - len(prompt))
    if len(prompt) + limit > engine.max_seq_len:
        raise ContextLengthExceeded(
            f"{param}: the context holds {engine.max_seq_len} tokens; the prompt has {len(prompt)} and "
            f"max_tokens asks for {limit} more, {len(prompt) + limit} in all",
            param=param,
        )
    return limit


def _plan(
    body: GenerationBody,
    prompts: list[list[int]],
    limits: list[int],
    engine: Engine,
    *,
    logprobs: int | None,
    echo: bool = False,
) -> Plan:
    given = {name: value for name in SLOT_FIELDS if (value := getattr(body, name, None)) is not None}
    given["top_k"] = max(body.top_k or 0, 0)
    if body.seed is None:
        given["seed"] = engine.next_seed()
    first = SamplingParams(
        **given,
        max_tokens=limits[0],
        logprobs=logprobs,
        prompt_logprobs=echo and logprobs is not None,
        ignore_eos=bool(body.ignore_eos),
    )
    options = body.stream_options
    return Plan(
        prompts=prompts,
        params=[first, *(replace(first, max_tokens=limit) for limit in limits[1:])],
        n=body.n or 1,
        stop=tuple(body.stop),
        echo=echo,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        owner=(body.user or "")[:MAX_OWNER_CHARS],
        priority=body.priority or 0,
    )
