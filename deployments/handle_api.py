"""The API by Serve handle: the reference's methods, over the engine that HTTP uses too.

serve.get_app_handle("llama").text_completion.remote(["Once upon a time"])
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ray.serve.context import _get_serve_request_context

from deployments.engine.interface import SamplingDefaults
from deployments.engine.metrics import Metrics
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from deployments.handle_call import Call, read_to_end, until_aborted
from deployments.http.errors import log_level
from deployments.tracing.tracing import Tracing
from llama_core.errors import InvalidDialog, InvalidParameter, LlamaError, QueueFull, RequestCancelled
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
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.chat_format import Dialog

Result = TypeVar("Result")


class HandleApi:
    """`LlamaIngress` inherits these methods; `service` and `metrics` are that replica's own."""

    service: LlamaService
    metrics: Metrics
    tracing: Tracing | None = None

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
        with self._call("generate", request_id) as call:
            return await self._generate(
                call, prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo, top_k, seed
            )

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
        tokenizer = self.service.tokenizer
        with self._call("text_completion", request_id) as call:
            encoded = [tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
            limit = self._limit(max_gen_len)
            generated = await self._generate(call, encoded, limit, temperature, top_p, logprobs, echo, top_k, seed)
        return completion_predictions(tokenizer, generated)

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
        with self._call("chat_completion", request_id) as call:
            batch = await self._in_thread_if_slow(lambda: DialogBatch(dialogs, self._encode))
            limit = self._limit(max_gen_len)
            generated = await self._generate(
                call, batch.prompts, limit, temperature, top_p, logprobs, False, top_k, seed
            )
        return batch.predictions(self.service.tokenizer, generated)

    async def stream(
        self,
        prompt: str | Sequence[int] | Dialog,
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
        with self._call("stream", request_id) as call:
            seed = self.service.next_seed() if seed is None else seed
            sampling = self._sampling(temperature, top_p, top_k)
            params = generation_params(
                self._limit(max_gen_len), sampling.temperature, sampling.top_p, top_k=sampling.top_k, seed=seed
            )
            tokens = await self._in_thread_if_slow(lambda: self._tokens_of(prompt))
            call.asks([tokens], params.max_tokens, params.temperature, params.top_p)
            stream = self.service.submit(tokens, params, stop=stop, is_timed=call.is_traced)
            call.streams.append(stream)
            try:
                async for delta in until_aborted(stream):
                    call.on_delta()
                    reason = delta.finish_reason.value if delta.finish_reason is not None else None
                    yield {"generation": delta.text, "tokens": delta.tokens, "finish_reason": reason}
            finally:
                stream.cancel()

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

    async def _generate(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        max_gen_len: int,
        temperature: float | None,
        top_p: float | None,
        logprobs: bool,
        echo: bool,
        top_k: int | None,
        seed: int | None,
    ) -> Generated:
        sampling = self._sampling(temperature, top_p, top_k)
        params = generation_params(
            max_gen_len,
            sampling.temperature,
            sampling.top_p,
            logprobs,
            echo,
            top_k=sampling.top_k,
            seed=0 if seed is None else seed,
        )
        call.asks(prompts, params.max_tokens, params.temperature, params.top_p)
        streams, num_read = call.streams, 0
        try:
            for prompt in prompts:
                own = replace(params, seed=self.service.next_seed() if seed is None else seed)
                # Prompts that do not fit the queue wait here until some of this call's own have ended.
                while (stream := self._try_submit(call, list(prompt), own, can_wait=num_read < len(streams))) is None:
                    await read_to_end(streams[num_read], call)
                    num_read += 1
                streams.append(stream)
            for stream in streams[num_read:]:
                await read_to_end(stream, call)
        finally:
            for stream in streams:
                stream.cancel()
        return generation_result([stream.sequence for stream in streams], logprobs, echo)

    def _try_submit(
        self, call: Call, prompt: list[int], params: SamplingParams, *, can_wait: bool
    ) -> SequenceStream | None:
        """None if the queue is full and the caller can wait for one of its own requests to end."""
        try:
            return self.service.submit(prompt, params, is_timed=call.is_traced)
        except QueueFull:
            if can_wait:
                return None
            raise

    @contextmanager
    def _call(self, method: str, request_id: str = "") -> Iterator[Call]:
        """Count and log one call, whether it succeeds or fails."""
        request_id = request_id or _get_serve_request_context().request_id or uuid.uuid4().hex
        trace = None if self.tracing is None else self.tracing.begin_call(method, request_id)
        log_subject.set(LogSubject(request_id, "" if trace is None else trace.trace_id))
        call = Call(self.metrics, method, request_id, trace)
        if self.service.args.log_prompts:
            call.decode = self.service.tokenizer.decode
        try:
            yield call
        except RequestCancelled:
            call.ended("cancelled", logging.INFO)
            raise
        except LlamaError as error:
            call.ended(error.code, log_level(error), error)
            raise
        except Exception:
            call.ended(LlamaError.code, logging.ERROR)
            raise
        except BaseException:  # cancelled, or a stream's reader left
            call.ended("cancelled", logging.INFO)
            raise
        else:
            call.ended("ok", logging.INFO)

    def _sampling(self, temperature: float | None, top_p: float | None, top_k: int | None) -> SamplingDefaults:
        """The caller's parameters, and the server's defaults for those that are None."""
        default = self.service.sampling_defaults
        return SamplingDefaults(
            default.temperature if temperature is None else temperature,
            default.top_p if top_p is None else top_p,
            default.top_k if top_k is None else top_k,
        )

    async def _in_thread_if_slow(self, work: Callable[[], Result]) -> Result:
        """`work()` encodes dialogs; a chat template may take long for a short one."""
        return work() if self.service.chat_format.is_quick else await asyncio.to_thread(work)

    def _limit(self, max_gen_len: int | None) -> int:
        return self.service.max_seq_len - 1 if max_gen_len is None else max_gen_len

    def _tokens_of(self, prompt: str | Sequence[int] | Dialog) -> list[int]:
        if isinstance(prompt, str):
            return self.service.tokenizer.encode(prompt, bos=True, eos=False)
        if all(isinstance(part, int) for part in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if all(isinstance(part, dict) for part in prompt):
            return self._encode(prompt)  # type: ignore[arg-type]
        raise InvalidParameter("prompt must be a text, a list of token ids or a dialog", param="prompt")

    def _encode(self, dialog: Dialog) -> list[int]:
        try:
            return self.service.chat_format.encode(dialog)
        except InvalidDialog:
            self.metrics.invalid_dialogs.add()
            raise
