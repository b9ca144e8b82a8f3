"""The typed API by Serve handle: `SamplingParams` in, results out, with grammars and scores.

handle = serve.get_app_handle("llama")
results = handle.sample.remote(["Once upon a time"], SamplingParams(max_tokens=32, min_p=0.1)).result()
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, overload

from deployments.engine.sequence_stream import SequenceStream
from deployments.handle_api import HandleApi
from deployments.handle_call import (
    Call,
    checked_bad_words,
    checked_limit,
    checked_n,
    prompt_logprobs_of,
    read_to_end,
    until_aborted,
)
from llama_core.errors import InvalidParameter
from llama_core.grammar.answers import answer_grammar
from llama_core.grammar.build import callers_grammar
from llama_core.scheduling.request import FinishReason, TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams, params_of_choices
from llama_core.text.chat_format import Dialog
from llama_core.text.spellings import spellings

Prompt = str | Sequence[int] | Dialog
Continuation = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The continuation of one prompt, or a part of it in a stream.

    finish_reason: "stop", "length" or "abort"; None in every part of a stream but the last. logprobs: one for each of `tokens`
    where `SamplingParams.logprobs` asks for them. prompt_logprobs: one for each token of the prompt but the first, where
    `SamplingParams.prompt_logprobs` asks for them; in a stream in the first part.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Score:
    """The log-likelihood of one continuation: the sum of `token_logprobs` (natural logarithms), one for each of `tokens`.

    is_greedy: whether greedy decoding would have written it.
    """

    score: float
    tokens: list[int]
    token_logprobs: list[float]
    is_greedy: bool


class TypedHandleApi(HandleApi):
    """`LlamaIngress` inherits these methods."""

    async def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
        request_id: str = "",
        owner: str = "",
        priority: int = 0,
    ) -> list[Sampled]:
        """Continue each prompt: a text, token ids or a dialog. params: for all, or one for each.

        n: continuations of each prompt, 1 to 128, side by side in the result, with the seeds of HTTP's `n` choices; the first
        has the prompt's log-probabilities. bad_words: beside the parameters' own, which are token ids. skip_special_tokens:
        False puts the names of control tokens into the text. timeout_s: seconds from the call to its end. request_id: a name
        by which `abort` ends all of them. owner, priority: as HTTP's `user` and `priority`. The seed is the parameters' own:
        equal prompts with equal parameters have equal results.

        Raises InvalidParameter, ContextLengthExceeded, QueueFull, NotReady, InvalidDialog, NoTokenAllowed or DeadlineExceeded.
        """
        with self._call("sample", request_id) as call:
            # First of all: the number of sequences bounds the work that follows, on the event loop.
            n = checked_n(n, len(prompts), self.service.config.max_batch_size + self.service.args.max_queue)
            limit_s = checked_limit(timeout_s)
            each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
            if len(each) != len(prompts):
                raise InvalidParameter("params must be one SamplingParams, or one for each prompt", param="params")
            spelled = self._spelled(bad_words)
            given = {id(own): own for own in each}  # prompts may share one object
            checked = {key: await self._checked(own, spelled, owner) for key, own in given.items()}
            choices: list[tuple[list[int], SamplingParams]] = []
            for prompt, own in zip(prompts, each, strict=True):
                ids = await self._prompt_ids(prompt)
                choices += [(ids, one) for one in params_of_choices(checked[id(own)], n)]
            try:
                if choices:
                    longest = max(own.max_tokens for _, own in choices)
                    call.asks([ids for ids, _ in choices[::n]], longest, each[0].temperature, each[0].top_p)
                    call.streams += self.service.submit_all(
                        choices,
                        stop=stop,
                        owner=owner,
                        priority=priority,
                        skip_special_tokens=skip_special_tokens,
                        is_timed=call.is_traced,
                    )
                    call.ends_within(limit_s)
                return [await _whole(stream, call) for stream in call.streams]
            finally:
                call.cancel()

    async def stream_sample(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
        request_id: str = "",
        owner: str = "",
        priority: int = 0,
    ) -> AsyncIterator[Sampled]:
        """`sample` of one prompt in parts, for `handle.options(stream=True)`."""
        with self._call("stream_sample", request_id) as call:
            limit_s = checked_limit(timeout_s)
            ids, own = await self._prompt_ids(prompt), await self._checked(params, self._spelled(bad_words), owner)
            call.asks([ids], own.max_tokens, own.temperature, own.top_p)
            try:
                call.streams += self.service.submit_all(
                    [(ids, own)],
                    stop=stop,
                    owner=owner,
                    priority=priority,
                    skip_special_tokens=skip_special_tokens,
                    is_timed=call.is_traced,
                )
                call.ends_within(limit_s)
                (stream,) = call.streams
                is_first = True
                async for delta in until_aborted(stream):
                    call.on_delta()
                    reason = None if delta.finish_reason is None else delta.finish_reason.value
                    cached = stream.num_cached_tokens
                    of_prompt = prompt_logprobs_of(stream) if is_first else []
                    is_first = False
                    yield Sampled(delta.text, delta.tokens, reason, list(delta.logprobs), len(ids), cached, of_prompt)
            finally:
                call.cancel()

    @overload  # a text is a list of texts to the type checker
    async def score(  # type: ignore[overload-overlap]
        self, prompt: Prompt, continuations: Sequence[Continuation], *, request_id: str = ""
    ) -> list[Score]: ...
    @overload
    async def score(
        self, prompt: Sequence[Prompt], continuations: Sequence[Sequence[Continuation]], *, request_id: str = ""
    ) -> list[list[Score]]: ...
    @overload
    async def score(self, prompt: Sequence[Prompt], *, request_id: str = "") -> list[Score]: ...
    async def score(self, prompt: Any, continuations: Any = None, *, request_id: str = "") -> Any:
        """The log-likelihood of each continuation after the prompt. Nothing is generated.

        A list of prompts takes a list of continuations for each of them, and gives a list for each. Without continuations it
        gives one Score for each prompt: of all its tokens but the first, which is BOS in a text.

        A text after a text prompt is encoded together with it; the tokens behind as many as the prompt alone has are its own.
        Raises what `sample` raises, and RequestAborted.
        """
        are_many = _are_prompts(prompt)
        with self._call("score", request_id) as call:
            prompts = list(prompt) if are_many else [prompt]
            wanted = _continuations_of(prompts, continuations, are_many)
            pairs = [pair for each, own in zip(prompts, wanted, strict=True) for pair in await self._pairs(each, own)]
            scores = iter(await self._scores(call, pairs))
        if continuations is None:
            return list(scores)
        grouped = [list(islice(scores, len(own or ()))) for own in wanted]
        return grouped if are_many else grouped[0]

    async def _pairs(self, prompt: Prompt, continuations: Sequence[Continuation] | None) -> list[tuple[list[int], int]]:
        """The ids of the prompt with each continuation, and where what is scored begins."""
        before = await self._prompt_ids(prompt)
        if continuations is not None:
            return [self._continued(prompt, before, continuation) for continuation in continuations]
        if len(before) < 2:
            raise InvalidParameter("prompt: each must have two tokens, of which the second is scored", param="prompt")
        return [(before, 1)]

    async def _scores(self, call: Call, pairs: Sequence[tuple[list[int], int]]) -> list[Score]:
        params = SamplingParams(temperature=0.0, max_tokens=0, logprobs=1, prompt_logprobs=True)
        call.asks([ids for ids, _ in pairs], 0, 0.0, params.top_p)
        call.streams += self.service.submit_all([(ids, params) for ids, _ in pairs], is_timed=call.is_traced)
        try:
            for stream in call.streams:
                await read_to_end(stream, call)
        finally:
            call.cancel()
        return [_score(stream, begin) for stream, (_, begin) in zip(call.streams, pairs, strict=True)]

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self._in_thread_if_slow(lambda: self._tokens_of(prompt))

    def _spelled(self, bad_words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return spellings(checked_bad_words(bad_words), self.service.tokenizer)

    async def _checked(
        self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], owner: str
    ) -> SamplingParams:
        """`params` with a compiled grammar, and with the tokens of `bad_words`."""
        if bad_words:
            params = replace(params, bad_words=(*params.bad_words, *bad_words))
        if not params.grammar:
            return params
        check = partial(
            answer_grammar,
            self.service.answer_format,
            callers_grammar(params.grammar),
            "grammar",
            scope=self.service.cache_scope(owner),
        )
        return replace(params, grammar=await asyncio.to_thread(check))

    def _continued(self, prompt: Prompt, before: list[int], continuation: Continuation) -> tuple[list[int], int]:
        """The ids of prompt and continuation, and where the continuation begins."""
        tokenizer = self.service.tokenizer
        if isinstance(prompt, str) and isinstance(continuation, str):
            ids = tokenizer.encode(prompt + continuation, bos=True, eos=False)
            begin = min(len(before), len(ids) - 1) if continuation else len(ids)
        else:
            if isinstance(continuation, str):
                after = tokenizer.encode(continuation, bos=False, eos=False)
            else:
                after = list(continuation)
            ids, begin = before + after, len(before)
        if not 1 <= begin < len(ids):
            raise InvalidParameter("continuations: each must have a token, and one before it", param="continuations")
        return ids, begin


def _are_prompts(prompt: Any) -> bool:
    """Whether it is a list of prompts: not a text, token ids or a dialog."""
    return not isinstance(prompt, str) and bool(len(prompt)) and not isinstance(prompt[0], int | Mapping)


def _continuations_of(
    prompts: Sequence[Prompt], continuations: Any, are_many: bool
) -> Sequence[Sequence[Continuation] | None]:
    """For each prompt, what may follow it; None: its own tokens are scored."""
    if continuations is None:
        return [None] * len(prompts)
    if not are_many:
        return [continuations]
    if len(continuations) != len(prompts) or any(isinstance(own, str) for own in continuations):
        raise InvalidParameter("continuations: several prompts need a list for each of them", param="continuations")
    return list(continuations)


async def _whole(stream: SequenceStream, call: Call) -> Sampled:
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    tokens: list[int] = []
    reason: FinishReason | None = None
    async for delta in until_aborted(stream):
        call.on_delta()
        texts.append(delta.text)
        tokens += delta.tokens
        logprobs += delta.logprobs
        reason = delta.finish_reason
    name = None if reason is None else reason.value
    cached, prompt_logprobs = stream.num_cached_tokens, prompt_logprobs_of(stream)
    return Sampled("".join(texts), tokens, name, logprobs, len(stream.prompt_tokens), cached, prompt_logprobs)


def _score(stream: SequenceStream, begin: int) -> Score:
    entries = stream.prompt_logprobs[begin - 1 :]
    logprobs = [entry.logprob for entry in entries]
    is_greedy = all(entry.logprob == entry.top[0][1] for entry in entries)
    return Score(sum(logprobs), stream.prompt_tokens[begin:], logprobs, is_greedy)
