"""The typed API by Serve handle: `SamplingParams` in, results out, with grammars, scores, and aborts by request id.

handle = serve.get_app_handle("llama")
results = handle.sample.remote(["Once upon a time"], SamplingParams(max_tokens=32, min_p=0.1)).result()
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deployments.engine.interface import Delta
from deployments.engine.sequence_stream import SequenceStream
from deployments.handle_api import HandleApi
from deployments.handle_call import Call, read_to_end
from llama_core.errors import InvalidParameter, RequestCancelled
from llama_core.scheduling.request import FinishReason, TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.chat_format import Dialog
from llama_core.text.grammar import checked_grammar, for_answer

Prompt = str | Sequence[int] | Dialog


@dataclass(frozen=True, slots=True)
class Sampled:
    """The continuation of one prompt, or a part of it in a stream.

    finish_reason: "stop", "length" or "abort"; None in every part of a stream but the last. logprobs: one for each of `tokens`
    where `SamplingParams.logprobs` asks for them.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]
    num_prompt_tokens: int
    num_cached_tokens: int


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
        stop: Sequence[str] = (),
        request_id: str = "",
        owner: str = "",
        priority: int = 0,
    ) -> list[Sampled]:
        """Continue each prompt: a text, token ids or a dialog. params: for all, or one for each.

        request_id: a name by which `abort` ends all of them. owner, priority: as HTTP's `user` and `priority`. The seed is
        the parameters' own: equal prompts with equal parameters have equal results. Raises InvalidParameter,
        ContextLengthExceeded, QueueFull, NotReady, InvalidDialog or NoTokenAllowed.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidParameter("params must be one SamplingParams, or one for each prompt", param="params")
        with self._call("sample", request_id) as call, self._named(request_id, call.streams):
            choices = [
                (await self._prompt_ids(prompt), await self._checked(own))
                for prompt, own in zip(prompts, each, strict=True)
            ]
            if choices:
                longest = max(own.max_tokens for _, own in choices)
                call.asks([ids for ids, _ in choices], longest, each[0].temperature, each[0].top_p)
                call.streams += self.service.submit_all(
                    choices, stop=stop, owner=owner, priority=priority, is_timed=call.is_traced
                )
            try:
                return [await _whole(stream, call) for stream in call.streams]
            finally:
                for stream in call.streams:
                    stream.cancel()

    async def stream_sample(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        request_id: str = "",
        owner: str = "",
        priority: int = 0,
    ) -> AsyncIterator[Sampled]:
        """`sample` of one prompt in parts, for `handle.options(stream=True)`."""
        with self._call("stream_sample", request_id) as call, self._named(request_id, call.streams):
            ids, own = await self._prompt_ids(prompt), await self._checked(params)
            call.asks([ids], own.max_tokens, own.temperature, own.top_p)
            stream = self.service.submit(ids, own, stop=stop, owner=owner, priority=priority, is_timed=call.is_traced)
            call.streams.append(stream)
            try:
                async for delta in until_aborted(stream):
                    call.on_delta()
                    reason = None if delta.finish_reason is None else delta.finish_reason.value
                    cached = stream.num_cached_tokens
                    yield Sampled(delta.text, delta.tokens, reason, list(delta.logprobs), len(ids), cached)
            finally:
                stream.cancel()

    async def abort(self, request_id: str) -> bool:
        """End the sequences of this replica's running calls with this request id; their results have the finish reason "abort".

        False if this replica runs no such call: with several replicas, another one may.
        """
        streams = self._running_calls.get(request_id, [])
        for stream in [stream for each in streams for stream in each]:
            stream.cancel()
        return bool(streams)

    async def score(self, prompt: Prompt, continuations: Sequence[str | Sequence[int]]) -> list[Score]:
        """The log-likelihood of each continuation after the prompt. Nothing is generated.

        A text after a text prompt is encoded together with it; the tokens behind as many as the prompt alone has are its own.
        """
        with self._call("score") as call:
            before = await self._prompt_ids(prompt)
            pairs = [self._continued(prompt, before, continuation) for continuation in continuations]
            params = SamplingParams(temperature=0.0, max_tokens=0, logprobs=1, prompt_logprobs=True)
            call.asks([ids for ids, _ in pairs], 0, 0.0, params.top_p)
            call.streams += self.service.submit_all([(ids, params) for ids, _ in pairs], is_timed=call.is_traced)
            try:
                for stream in call.streams:
                    await read_to_end(stream, call)
            finally:
                for stream in call.streams:
                    stream.cancel()
            return [_score(stream, begin) for stream, (_, begin) in zip(call.streams, pairs, strict=True)]

    @property
    def _running_calls(self) -> dict[str, list[list[SequenceStream]]]:
        """The streams of running calls by their request id. Made when it is first asked for: Serve owns the constructor."""
        calls: dict[str, list[list[SequenceStream]]] = self.__dict__.setdefault("_calls_by_id", {})
        return calls

    @contextmanager
    def _named(self, request_id: str, streams: list[SequenceStream]) -> Iterator[None]:
        """`abort` finds the streams by `request_id` in this context."""
        if not request_id:
            yield
            return
        calls = self._running_calls.setdefault(request_id, [])
        calls.append(streams)
        try:
            yield
        finally:
            self._running_calls[request_id] = [each for each in calls if each is not streams]
            if not self._running_calls[request_id]:
                del self._running_calls[request_id]

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self._in_thread_if_slow(lambda: self._tokens_of(prompt))

    async def _checked(self, params: SamplingParams) -> SamplingParams:
        if not params.grammar:
            return params
        grammar = await asyncio.to_thread(checked_grammar, params.grammar, "grammar")
        return replace(params, grammar=for_answer(grammar, self.service.tokenizer))

    def _continued(self, prompt: Prompt, before: list[int], continuation: str | Sequence[int]) -> tuple[list[int], int]:
        """The ids of prompt and continuation, and where the continuation begins."""
        tokenizer = self.service.tokenizer
        if isinstance(prompt, str) and isinstance(continuation, str):
            ids = tokenizer.encode(prompt + continuation, bos=True, eos=False)
            begin = min(len(before), len(ids) - 1)
        else:
            if isinstance(continuation, str):
                after = tokenizer.encode(continuation, bos=False, eos=False)
            else:
                after = list(continuation)
            ids, begin = before + after, len(before)
        if not 1 <= begin < len(ids):
            raise InvalidParameter("continuations: each must have a token, and one before it", param="continuations")
        return ids, begin


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
    return Sampled("".join(texts), tokens, name, logprobs, len(stream.prompt_tokens), stream.num_cached_tokens)


async def until_aborted(stream: SequenceStream) -> AsyncIterator[Delta]:
    """The stream's deltas; the last has the finish reason "abort" if `abort` ends it."""
    try:
        async for delta in stream:
            yield delta
    except RequestCancelled:
        yield Delta("", [], [], FinishReason.ABORT)


def _score(stream: SequenceStream, begin: int) -> Score:
    entries = stream.prompt_logprobs[begin - 1 :]
    logprobs = [entry.logprob for entry in entries]
    is_greedy = all(entry.logprob == entry.top[0][1] for entry in entries)
    return Score(sum(logprobs), stream.prompt_tokens[begin:], logprobs, is_greedy)
