"""The Serve deployment: the reference's API for handles, HTTP for everyone else, and what Serve itself asks of a replica."""

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve

from cluster.driver.group_info import GroupLimits
from cluster.driver.ray_calls import in_passing_thread
from cluster.driver.standby import StandbyPool
from cluster.wire.rank_runner import MODEL_RUNNER_FACTORY, NamedRunnerFactory
from deployments.api_keys import ApiKeys
from deployments.args import ServerArgs, resolve
from deployments.engine.metrics import Metrics
from deployments.engine.service import LlamaService
from deployments.engine.token_stream import TokenStream
from deployments.http.app import build_http_app
from deployments.http.request_log import Batched
from deployments.local.banner import banner
from deployments.local.loopback import keep_replica_on_loopback
from llama_core.errors import InvalidDialog, InvalidParameter, LlamaError, QueueFull, SpecialTags
from llama_core.results import (
    ChatPrediction,
    CompletionPrediction,
    chat_prediction,
    completion_prediction,
    generation_result,
    refused_prediction,
)
from llama_core.scheduling.request import describe_request, warn_of_unfinished
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.chat_format import Dialog

log = logging.getLogger(__name__)


@serve.ingress()
class LlamaIngress:
    """One replica: a service over the ranks of this replica's own placement group."""

    async def __init__(self, args: ServerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises what the files can tell of a start that cannot succeed; Serve then reports the deployment as failed."""
        keep_replica_on_loopback()
        _log_like_serve()
        self._keys = ApiKeys(args.api_key_digests, resolve(args.api_key_file) if args.api_key_file else None)
        self.metrics = Metrics()
        self.service = LlamaService(
            args,
            _pool_for(args),
            on_step=self.metrics.on_step,
            on_failure=self.metrics.on_failure,
            on_compute_ms=self.metrics.on_compute_ms,
        )
        self.metrics.watch(self.service)
        self._starting = asyncio.create_task(self.service.start())
        self._starting.add_done_callback(self._started)
        try:
            # Serve sends requests to a replica from here on. If others serve, nobody needs this one before it is ready.
            limit = None if await _another_replica_runs() else args.answer_after_s
            # Here, where the ranks are starting: Serve asks for it only when this returns.
            self._http_app = build_http_app(
                self.service,
                self.metrics,
                max_body_bytes=args.max_body_bytes,
                request_timeout_s=args.request_timeout_s,
                keys=self._keys,
                allowed_hosts=[*args.allowed_hosts, _http_address()[0]],
                sends_request_id=False,
            )
            await asyncio.wait_for(asyncio.shield(self._starting), limit)
        except TimeoutError:
            log.warning("still loading after %.0f s: answering 503 until the ranks are ready", args.answer_after_s)
        except BaseException:
            self._starting.cancel()
            await self.service.stop()
            raise

    def _started(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() or starting.exception() is not None:  # which the service has logged
            return
        # What lives as long as the replica is not looked at again: one collection of all of it would hold every stream for
        # 0.15 s. And a request leaves hardly any cycles, so looking for them can wait.
        gc.freeze()
        gc.set_threshold(10_000)
        if os.environ.get("LLAMA_BANNER", "1") != "0":
            print(banner(self._describe(), *_http_address()), flush=True)

    def __serve_build_asgi_app__(self) -> Any:
        return self._http_app

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self.service.live():
            raise RuntimeError(self.service.readiness().detail or "no step completes")

    async def __del__(self) -> None:
        service = getattr(self, "service", None)
        if service is not None:
            await service.drain()
            self._starting.cancel()
            await service.stop()
            for handler in logging.getLogger("llama").handlers:
                handler.flush()

    # By handle: serve.get_app_handle("llama").text_completion.remote(...)

    async def generate(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        *,
        top_k: int = 0,
        seed: int | None = None,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """As `llama_core.Llama.generate`; prompts of other callers run beside these. `seed` is that of every prompt."""
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_gen_len,
            logprobs=0 if logprobs else None,
            prompt_logprobs=logprobs and echo,
        )
        log.info("by handle: %s", describe_request(prompt_tokens, max_gen_len, temperature, top_p))
        streams: list[TokenStream] = []
        num_read = 0
        with self._counted() as on_delta:
            try:
                for prompt in prompt_tokens:
                    own = replace(params, seed=self.service.next_seed() if seed is None else seed)
                    # More prompts than the queue holds wait here, until some of this call's own have ended.
                    while (stream := self._try_submit(list(prompt), own, can_wait=num_read < len(streams))) is None:
                        await _read_to_end(streams[num_read], on_delta)
                        num_read += 1
                    streams.append(stream)
                for stream in streams[num_read:]:
                    await _read_to_end(stream, on_delta)
            finally:
                for stream in streams:
                    stream.cancel()
        sequences = [stream.sequence for stream in streams]
        warn_of_unfinished(sequences)
        return generation_result(sequences, logprobs, echo)

    async def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        top_k: int = 0,
        seed: int | None = None,
    ) -> list[CompletionPrediction]:
        """As `llama_core.Llama.text_completion`."""
        tokenizer = self.service.tokenizer
        encoded = [tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
        limit = self.service.max_seq_len - 1 if max_gen_len is None else max_gen_len
        tokens, values = await self.generate(encoded, limit, temperature, top_p, logprobs, echo, top_k=top_k, seed=seed)
        return [completion_prediction(tokenizer, out, values[i] if values else None) for i, out in enumerate(tokens)]

    async def chat_completion(
        self,
        dialogs: Sequence[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        top_k: int = 0,
        seed: int | None = None,
    ) -> list[ChatPrediction]:
        """As `llama_core.Llama.chat_completion`: a dialog with special tags gets the reference's refusal."""
        encoded: dict[int, list[int]] = {}
        for i, dialog in enumerate(dialogs):
            try:
                encoded[i] = self._encode(dialog)
            except SpecialTags:
                log.warning("dialog %d holds special tags and is refused", i)
        limit = self.service.max_seq_len - 1 if max_gen_len is None else max_gen_len
        tokens, values = await self.generate(
            list(encoded.values()), limit, temperature, top_p, logprobs, top_k=top_k, seed=seed
        )
        predictions: list[ChatPrediction] = [refused_prediction(logprobs) for _ in dialogs]
        for n, i in enumerate(encoded):
            predictions[i] = chat_prediction(self.service.tokenizer, tokens[n], values[n] if values else None)
        return predictions

    async def stream(
        self,
        prompt: str | Sequence[int] | Dialog,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> AsyncIterator[dict[str, Any]]:
        """One prompt (text, token ids or a dialog), as it comes; for `handle.options(stream=True)`.

        Yields {"generation": text, "tokens": ids, "finish_reason": None}; the last has "stop" or "length".
        """
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=self.service.next_seed() if seed is None else seed,
            max_tokens=self.service.max_seq_len - 1 if max_gen_len is None else max_gen_len,
        )
        tokens = self._tokens_of(prompt)
        log.info("by handle, streamed: %s", describe_request([tokens], params.max_tokens, temperature, top_p))
        with self._counted() as on_delta:
            stream = self.service.submit(tokens, params, stop=stop)
            try:
                async for delta in stream:
                    on_delta()
                    reason = delta.finish_reason.value if delta.finish_reason is not None else None
                    yield {"generation": delta.text, "tokens": delta.tokens, "finish_reason": reason}
            finally:
                stream.cancel()
            warn_of_unfinished([stream.sequence])

    async def describe(self) -> dict[str, Any]:
        """What GET /props answers, and whether HTTP asks for API keys."""
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        return {**asdict(self.service.describe()), "api_keys": self._keys.are_required}

    async def drain(self) -> None:
        """Take no new request from now on (503, `/ready` says draining), and return when the live ones have ended."""
        await self.service.drain()

    def _try_submit(self, prompt: list[int], params: SamplingParams, *, can_wait: bool) -> TokenStream | None:
        """None if the queue is full and the caller can wait for something of its own to end."""
        try:
            return self.service.submit(prompt, params)
        except QueueFull:
            if can_wait:
                return None
            raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Callable[[], None]]:
        """Counts one call by handle; what it gives is to be called for each delta, the first of which stamps the time."""
        begin, seen = time.monotonic(), False

        def on_delta() -> None:
            nonlocal seen
            if not seen:
                seen = True
                self.metrics.first_token(time.monotonic() - begin)

        outcome = "cancelled"
        try:
            yield on_delta
            outcome = "ok"
        except LlamaError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = LlamaError.code
            raise
        finally:
            self.metrics.requests_total.add(path="handle", outcome=outcome)

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
            self.metrics.count_invalid_dialog()
            raise


async def _read_to_end(stream: TokenStream, on_delta: Callable[[], None]) -> None:
    async for _ in stream:
        on_delta()


def _pool_for(args: ServerArgs) -> Callable[[], StandbyPool]:
    limits = GroupLimits(start_timeout_s=args.start_timeout_s, step_timeout_s=args.step_timeout_s)

    def open_pool() -> StandbyPool:
        placement_group = ray.util.get_current_placement_group()
        assert placement_group is not None, "build_app gives every replica a placement group"
        factory = NamedRunnerFactory(args.runner_factory) if args.runner_factory else MODEL_RUNNER_FACTORY
        return StandbyPool(placement_group, limits, enabled=args.spare_ranks, runner_factory=factory)

    return open_pool


async def _another_replica_runs() -> bool:
    """Whether this deployment has a replica that serves already. Serve's controller knows."""
    context = serve.get_replica_context()
    try:
        status = await in_passing_thread(serve.status)
        states = status.applications[context.app_name].deployments[context.deployment].replica_states
    except Exception as error:  # not worth failing a start for
        log.warning("the other replicas' state is not known: %s", type(error).__name__)
        return False
    return any(state == "RUNNING" and count > 0 for state, count in states.items())


def _log_like_serve() -> None:
    """Our log lines, from INFO up, go where Serve's own go: the replica's log file and its standard error."""
    serve_log = logging.getLogger("ray.serve")
    for name in ("llama", "llama_core", "cluster", "deployments"):
        ours = logging.getLogger(name)
        ours.setLevel(logging.INFO)
        ours.handlers = serve_log.handlers
        ours.propagate = False
    logging.getLogger("llama").handlers = [Batched(serve_log.handlers)]


def _http_address() -> tuple[str, int]:
    """Host and port of Serve's HTTP proxies. Serve keeps them to itself; without an answer, its defaults."""
    try:
        controller = serve.context._get_global_client()
        assert controller is not None
        return controller.http_config.host or "127.0.0.1", controller.http_config.port
    except Exception:
        return "127.0.0.1", 8000
