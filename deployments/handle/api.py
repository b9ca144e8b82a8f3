"""The API by Serve handle: the reference's methods, and typed ones, over the engine that HTTP uses too.

handle = serve.get_app_handle("llama")
handle.text_completion.remote(["Once upon a time"])
handle.sample.remote(["Once upon a time"], SamplingParams(max_tokens=32, min_p=0.1))
handle.chat.remote(ChatRequest(messages, tools=tools), SamplingParams(max_tokens=256))
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, overload

from ray import serve
from ray.serve.context import _get_serve_request_context

from deployments.engine.interface import Engine
from deployments.handle.call import Call, HandleModels, are_prompts, checked_limit, checked_n
from deployments.handle_types import (
    ChatAnswer,
    ChatPart,
    ChatRequest,
    Continuation,
    Prompt,
    Sampled,
    Score,
    joined,
    whole,
)
from deployments.http.app import HttpApp
from deployments.observe.metrics import Metrics
from deployments.observe.request_log import RequestRecord
from deployments.observe.tracing import Tracing
from deployments.openai.plan import Plan, engine_of
from deployments.openai.prompt_encoder import PromptEncoder, TextLimits
from deployments.openai.score import scored
from llama_core.log_lines import LogSubject, log_subject
from llama_core.results import (
    ChatPrediction,
    CompletionPrediction,
    DialogBatch,
    Generated,
    completion_predictions,
    generation_params,
    generation_result,
)
from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.chat_format import Dialog


class HandleApi:
    """`LlamaIngress` inherits these methods; `service` and `metrics` are that replica's own. Where it serves several models,
    `handle.options(multiplexed_model_id=NAME)` chooses one.

    Every call raises InvalidParameter, ContextLengthExceeded, QueueFull, NotReady, RankFailure or RequestAborted; those with
    dialogs raise InvalidDialog, and the typed ones NoTokenAllowed and, with a time limit, DeadlineExceeded.
    """

    service: HandleModels
    logs_prompts: bool = False
    metrics: Metrics
    tracing: Tracing | None = None
    _http_app: HttpApp

    async def stored_answers(self, owner: str, ids: list[str]) -> dict[str, bytes]:
        """For other replicas: what this one keeps of answers and their items, by id."""
        return self._http_app.stored.find(owner, ids)

    async def generate(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int,
        temperature: float | None = None,
        top_p: float | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        top_k: int | None = None,
        seed: int | None = None,
        request_id: str = "",
    ) -> Generated:
        """As `llama_core.Llama.generate`; prompts of other callers run in the same batch. Every prompt has the same `seed`.

        Sampling parameters that are None are the server's (`sampling_defaults`). request_id: of the log, and for `abort`,
        after which the call raises RequestAborted; by default Serve's.
        """
        async with self._call("generate", request_id) as call:
            params = self._params(call.engine, max_gen_len, temperature, top_p, top_k, logprobs=logprobs, echo=echo)
            return await self._generate(call, prompt_tokens, params, seed, echo)

    async def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float | None = None,
        top_p: float | None = None,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        top_k: int | None = None,
        seed: int | None = None,
        request_id: str = "",
    ) -> list[CompletionPrediction]:
        """As `llama_core.Llama.text_completion`."""
        async with self._call("text_completion", request_id) as call:
            tokenizer = call.engine.tokenizer
            params = self._params(call.engine, max_gen_len, temperature, top_p, top_k, logprobs=logprobs, echo=echo)
            encoded = [tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
            return completion_predictions(tokenizer, await self._generate(call, encoded, params, seed, echo))

    async def chat_completion(
        self,
        dialogs: Sequence[Dialog],
        temperature: float | None = None,
        top_p: float | None = None,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        top_k: int | None = None,
        seed: int | None = None,
        request_id: str = "",
    ) -> list[ChatPrediction]:
        """As `llama_core.Llama.chat_completion`: a dialog with special tags gets the reference's refusal."""
        async with self._call("chat_completion", request_id) as call:
            params = self._params(call.engine, max_gen_len, temperature, top_p, top_k, logprobs=logprobs)
            batch = await call.in_thread_if_slow(lambda: DialogBatch(dialogs, call.engine.chat_format.encode))
            self.metrics.invalid_dialogs.add(len(dialogs) - len(batch.prompts))
            generated = await self._generate(call, batch.prompts, params, seed, echo=False)
            return batch.predictions(call.engine.tokenizer, generated)

    async def stream(
        self,
        prompt: Prompt,
        temperature: float | None = None,
        top_p: float | None = None,
        max_gen_len: int | None = None,
        *,
        top_k: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        request_id: str = "",
    ) -> AsyncIterator[dict[str, Any]]:
        """One prompt (text, token ids or a dialog), as a stream; for `handle.options(stream=True)`.

        Yields {"generation": text, "tokens": ids, "finish_reason": None}; the last has "stop", "length" or "abort".
        """
        async with self._call("stream", request_id) as call:
            params = replace(
                self._params(call.engine, max_gen_len, temperature, top_p, top_k), seed=_seed(call.engine, seed)
            )
            request = Request([await call.prompt_ids(prompt)], [params], stop=tuple(stop))
            await call.submit(Plan(request, stream=True))
            async for part in call.parts(call.streams[0]):
                yield {"generation": part.text, "tokens": part.tokens, "finish_reason": part.finish_reason}

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
        """
        async with self._call("sample", request_id) as call:
            # First of all: the number of sequences bounds the work that follows, on the event loop.
            n = checked_n(n, len(prompts), call.engine)
            limit_s = checked_limit(timeout_s)
            options = Request((), (), n, tuple(stop), Terms(owner, priority), skip_special_tokens=skip_special_tokens)
            await call.submit(Plan(await call.plan_sample(prompts, params, bad_words, options)), limit_s)
            return [joined([part async for part in call.parts(stream)]) for stream in call.streams]

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
        async with self._call("stream_sample", request_id) as call:
            limit_s = checked_limit(timeout_s)
            options = Request((), (), 1, tuple(stop), Terms(owner, priority), skip_special_tokens=skip_special_tokens)
            request = await call.plan_sample([prompt], params, bad_words, options)
            await call.submit(Plan(request, stream=True), limit_s)
            async for part in call.parts(call.streams[0]):
                yield part

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

        A text after a text prompt is encoded together with it; the tokens after as many as the prompt alone has are its own.
        """
        async with self._call("score", request_id) as call:
            counts, plan = await call.plan_score(prompt, continuations)
            await call.submit(plan)
            for stream in call.streams:
                await call.read_to_end(stream)
        found = map(scored, call.streams, plan.scored_from)
        all_scores = (Score(sum(logprobs), tokens, logprobs, is_greedy) for tokens, logprobs, is_greedy in found)
        scores = [list(islice(all_scores, count)) for count in counts]
        if continuations is None:
            return [own for (own,) in scores]
        return scores if are_prompts(prompt) else scores[0]

    async def chat(self, request: ChatRequest, params: SamplingParams) -> ChatAnswer:
        """Answer a chat. The seed is the parameters' own. `params.grammar` is for the text of the answer, as
        `structured_outputs` is.
        """
        async with self._call("chat", request.request_id) as call:
            limit_s, plan = checked_limit(request.timeout_s), await call.plan_chat(request, params)
            await call.submit(plan, limit_s)
            return whole([part async for part in call.chat_parts(plan)])

    async def stream_chat(self, request: ChatRequest, params: SamplingParams) -> AsyncIterator[ChatPart]:
        """`chat` in parts, for `handle.options(stream=True)`. The last has the finish reason."""
        async with self._call("stream_chat", request.request_id) as call:
            limit_s, plan = checked_limit(request.timeout_s), await call.plan_chat(request, params)
            await call.submit(replace(plan, stream=True), limit_s)
            async for part in call.chat_parts(plan):
                yield part

    async def abort(self, request_id: str) -> bool:
        """End the sequences of the request with this id, by handle or over HTTP, where it is the X-Request-ID of the answer.

        Results that have a finish reason have "abort" then, other calls raise RequestAborted, and a client gets 503
        `request_aborted` or an error event. False if no sequence of it is queued or runs here. With several replicas,
        `handle.broadcast("abort", request_id)` asks each of them, and `handle.abort.remote` one that Serve chooses.
        """
        return self.service.abort(request_id)

    async def drain(self) -> None:
        """Take no new request from now on (503, `/ready` says draining), and return when the live ones have ended. Those
        that have not within `drain_timeout_s` are aborted."""
        await self.service.drain()

    @asynccontextmanager
    async def _call(self, method: str, request_id: str) -> AsyncIterator[Call]:
        """Count and log one call, whether it succeeds or fails. Its sequences end with it."""
        request_id = request_id or _get_serve_request_context().request_id or uuid.uuid4().hex
        trace = None if self.tracing is None else self.tracing.begin_call(method, request_id)
        log_subject.set(LogSubject(request_id, "" if trace is None else trace.trace_id))
        record = RequestRecord(self.metrics, "handle", request_id, trace=trace, method=method)
        name = serve.get_multiplexed_model_id() or None
        await self.service.meet_model(name)
        engine = engine_of(self.service, name)
        call = Call(engine, self._encoder, record, logs_prompts=self.logs_prompts)
        try:
            yield call
        except BaseException as error:  # or the reader of a stream left
            call.close()
            call.record.failed(error)
            raise
        call.close()
        call.record.succeeded()

    def _params(
        self,
        engine: Engine,
        max_gen_len: int | None,
        temperature: float | None,
        top_p: float | None,
        top_k: int | None,
        *,
        logprobs: bool = False,
        echo: bool = False,
    ) -> SamplingParams:
        """The reference's arguments, and the server's defaults for those that are None."""
        default = engine.sampling_defaults
        return generation_params(
            engine.max_seq_len - 1 if max_gen_len is None else max_gen_len,
            default.temperature if temperature is None else temperature,
            default.top_p if top_p is None else top_p,
            logprobs,
            echo,
            top_k=default.top_k if top_k is None else top_k,
            seed=0,
        )

    async def _generate(
        self, call: Call, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int | None, echo: bool
    ) -> Generated:
        each = [replace(params, seed=_seed(call.engine, seed)) for _ in prompts]
        await call.read_all(Plan(Request([list(prompt) for prompt in prompts], each)))
        return generation_result([stream.sequence for stream in call.streams], params.logprobs is not None, echo)

    @cached_property  # Serve owns the constructor
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(TextLimits())


def _seed(engine: Engine, seed: int | None) -> int:
    return engine.next_seed() if seed is None else seed
