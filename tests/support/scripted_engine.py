"""An engine without a model: it streams a scripted answer token by token through the real tokenizer and stop checks.

It has the engine's whole interface to the HTTP layer. Tests can count submitted and cancelled requests and the blocks in use.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Thread
from typing import Any, cast

import httpx
import uvicorn

from deployments.engine.interface import Engine, EngineState, Models, Readiness, SamplingDefaults
from deployments.engine.sequence_stream import Delta, SequenceStream
from deployments.engine.timeline import Timeline
from deployments.http.app import build_http_app
from deployments.http.limits import HttpLimits
from deployments.observe.metrics import Metrics
from llama_core.errors import LlamaError, QueueFull, RequestCancelled
from llama_core.scheduling.request import FinishReason, Request, TokenLogprob, check_prompt
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.answer_format import AnswerFormat, open_answer_format
from llama_core.text.chat_format import ChatFormat
from llama_core.text.detokenizer import IncrementalDetokenizer, StopChecker
from llama_core.text.registry import find_chat_format, load_tokenizer
from tests.conftest import GOLDEN
from tests.support import http
from tests.support.fake_ranks import embedding_of
from tests.support.waiting import wait_until

MODEL_ID = "fake-llama"
MAX_SEQ_LEN = 256


@dataclass(eq=False)
class FakeStream:
    """One sequence. `answer`: its tokens before EOS."""

    engine: "FakeEngine"
    prompt: list[int]
    params: SamplingParams
    stop: Sequence[str]
    answer: list[int]
    cancelled: bool = False
    ended: bool = False
    num_asked: int = 0  # deltas that the reader has asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()
    matched_stop: str | None = None
    numerics: str = ""
    timeline: Timeline = field(default_factory=lambda: Timeline(time.monotonic()))

    @property
    def prompt_tokens(self) -> list[int]:
        return self.prompt

    @property
    def stop_reason(self) -> str | int | None:
        return self.matched_stop

    def __post_init__(self) -> None:
        self._next: Delta | Exception | None = None
        self._deltas_taken: list[Delta] = []
        self._again: list[Delta] = []  # to be taken once more
        self._taken = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        self._runs = asyncio.Event()
        self._runs.set()
        self._producing = asyncio.ensure_future(self._produce())

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._again or self._next is not None:
            wake()

    def take(self, until: int | None = None) -> Delta | None:
        """Deltas of one token, with the answer's end beside the last one; `until` that token, they are divided."""
        if self._again:
            return self._divided(self._again.pop(0), until)
        taken, self._next = self._next, None
        self._taken.set()
        if isinstance(taken, Exception):
            raise taken
        return None if taken is None else self._divided(taken, until)

    def _divided(self, delta: Delta, until: int | None) -> Delta:
        num_tokens = sum(len(each.tokens) for each in self._deltas_taken) + len(delta.tokens)
        if delta.finish_reason is not None and until == num_tokens:
            self._again.insert(0, Delta("", [], [], delta.finish_reason))
            delta = delta._replace(finish_reason=None)
        self._deltas_taken.append(delta)
        self.listen(self._wake)
        return delta

    @property
    def embedding(self) -> bytes:
        return embedding_of(self.prompt, self.params.pooling)

    @property
    def num_bytes(self) -> int:
        return 100 * len(self._deltas_taken)

    def cancel(self) -> None:
        if not self.ended:
            self.cancelled = self.ended = True
            self._producing.cancel()

    def suspend(self) -> None:
        self._runs.clear()

    def go_on(self) -> None:
        self._again, self._deltas_taken = [*self._deltas_taken, *self._again], []
        self._runs.set()

    @property
    def is_suspended(self) -> bool:
        return not self._runs.is_set()

    def end(self, error: LlamaError) -> None:
        if not self.ended:
            self.cancel()
            self._next = error
            self._wake()

    async def _produce(self) -> None:
        """Produce the next delta when the reader has taken the last one, so that `num_asked` is the reader's progress."""
        try:
            async for delta in self._deltas():
                await self._hand_over(delta)
        except Exception as error:
            await self._hand_over(error)

    async def _hand_over(self, item: Delta | Exception) -> None:
        self._next = item
        self._taken.clear()
        self._wake()
        await self._taken.wait()

    async def _deltas(self) -> AsyncIterator[Delta]:
        params, engine = self.params, self.engine
        detokenizer = IncrementalDetokenizer(
            engine.tokenizer, skip_special_tokens=self.skip_special_tokens, shown=self.shown_tokens
        )
        stops = StopChecker(self.stop, includes_stop=params.include_stop_str_in_output)
        if params.prompt_logprobs:
            self.prompt_logprobs = [engine.logprob(token, params) for token in self.prompt[1:]]
        answer = self.answer
        if params.ignore_eos:
            answer = list(itertools.islice(itertools.cycle(answer), params.max_tokens))
        is_long = len(answer) >= params.max_tokens
        reason = FinishReason.LENGTH if is_long else FinishReason.STOP
        answer = answer[: params.max_tokens]
        for i, token in enumerate(answer):
            await self._runs.wait()
            await engine.delay(self, i)
            if self.cancelled:
                raise RequestCancelled("cancelled")
            is_last = i == len(answer) - 1
            text = detokenizer.push([token]) + (detokenizer.flush() if is_last else "")
            emit, stopped = stops.push(text, may_stop=i >= params.min_tokens)
            self.matched_stop = stops.matched
            if is_last and not stopped:
                emit += stops.flush()
            logprobs = [] if params.logprobs is None else [engine.logprob(token, params)]
            self.ended = is_last or stopped
            finish = (FinishReason.STOP if stopped else reason) if self.ended else None
            yield Delta(emit, [token], logprobs, finish)
            if self.ended:
                return
        self.ended = True
        yield Delta("", [], [], reason)


class FakeEngine:
    """Answers everything with `answer`. `fail_at`: (token index, error) that streams of `fail_prompt` raise there."""

    model_id = MODEL_ID
    adapter, parent = "", None
    max_seq_len = MAX_SEQ_LEN
    max_request_tokens = 128 * MAX_SEQ_LEN
    served_numerics = frozenset({""})
    asleep: frozenset[str] = frozenset()

    def __init__(self, answer: str = "Hello there, how are you?", step_s: float = 0.0) -> None:
        self.tokenizer = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
        self.chat_format: ChatFormat = find_chat_format("llama2", self.tokenizer)
        self.tool_format = "auto"
        self.sampling_defaults = SamplingDefaults()
        self.answer = answer
        self.step_s = step_s
        self.streams: list[FakeStream] = []
        self.owners: list[tuple[str, int]] = []  # owner and priority of each submitted request
        self.state = Readiness(True, "ready")
        self.alive = True
        self.max_streams = 10_000
        self.fail_at: tuple[int, Exception] | None = None
        self.fail_prompt: Callable[[FakeStream], bool] = lambda stream: True
        self.hold: asyncio.Event | None = None  # streams wait for it before their first token
        self._num_seeds = 0

    @property
    def models(self) -> dict[str, Engine]:
        return {self.model_id: self}

    async def meet_model(self, model: str | None) -> None:
        pass

    @property
    def answer_format(self) -> AnswerFormat:
        return open_answer_format(self.tool_format, self.tokenizer, self.chat_format)

    def readiness(self) -> Readiness:
        return self.state

    def live(self) -> bool:
        return self.alive

    def next_seed(self) -> int:
        self._num_seeds += 1
        return self._num_seeds

    def cache_scope(self, owner: str) -> str:
        return owner

    def check_capacity(self, owner: str = "") -> None:
        if not self.state.takes_requests:
            raise self.state.not_ready()
        if self.num_open >= self.max_streams:
            raise QueueFull("too many requests wait", retry_after_s=1.5)

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return self.tokenizer.encode(self.answer, bos=False, eos=False)

    async def submit(self, request: Request, *, is_timed: bool = False, numerics: str = "") -> list[SequenceStream]:
        streams: list[FakeStream] = []
        try:
            for prompt, params in request.choices():
                self.owners.append((request.terms.owner, request.terms.priority))
                check_prompt(prompt, self.tokenizer.n_words, self.max_seq_len)
                params.check_tokens(self.tokenizer.n_words)
                self.check_capacity()
                stream = FakeStream(self, prompt, params, request.stop, self._answer(prompt, params))
                stream.skip_special_tokens, stream.shown_tokens = request.skip_special_tokens, request.shown_tokens
                streams.append(stream)
                self.streams.append(stream)
        except LlamaError:
            for stream in streams:
                stream.cancel()
            raise
        return cast(list[SequenceStream], streams)

    async def readmit(self, streams: Sequence[SequenceStream], *, is_timed: bool = False) -> None:
        self.check_capacity()
        for stream in cast(list[FakeStream], streams):
            stream.go_on()

    @property
    def num_open(self) -> int:
        return sum(not (stream.ended or stream.is_suspended) for stream in self.streams)

    def describe(self) -> EngineState:
        return EngineState(
            model=self.model_id,
            phase=self.state.phase,
            world_size=1,
            epoch=0,
            ranks=(),
            spare_ranks_ready=0,
            max_seq_len=self.max_seq_len,
            max_seq_len_reason="as configured",
            max_batch_size=8,
            max_step_tokens=64,
            max_queue=8,
            max_queue_tokens=1024,
            block_size=16,
            sampling_defaults=self.sampling_defaults,
            blocks_total=100,
            blocks_used=self.num_open,
            requests_running=self.num_open,
        )

    def logprob(self, token: int, params: SamplingParams) -> TokenLogprob:
        """The chosen token is the most likely one; its neighbours in the vocabulary follow."""
        return _logprob(token, params.logprobs or 0, self.tokenizer.n_words)

    async def delay(self, stream: FakeStream, index: int) -> None:
        stream.num_asked += 1
        if index == 0 and self.hold is not None:
            await self.hold.wait()
        if self.fail_at is not None and self.fail_at[0] == index and self.fail_prompt(stream):
            stream.ended = True
            raise self.fail_at[1]
        await asyncio.sleep(self.step_s)


def calling_engine(answer: str, tool_format: str = "hermes") -> FakeEngine:
    """An engine that reads calls of tools in its answer, with room for long prompts."""
    engine = FakeEngine(answer)
    engine.max_seq_len = 8192
    engine.max_request_tokens = 10**6
    engine.tool_format = tool_format
    return engine


@cache
def _logprob(token: int, num_top: int, vocab_size: int) -> TokenLogprob:
    value = -0.1 - (token % 7) / 3
    return TokenLogprob(value, tuple(((token + i) % vocab_size, value - i) for i in range(num_top)))


@dataclass(frozen=True)
class Served:
    """A running server: its engine, its address, its metrics."""

    engine: FakeEngine
    metrics: Metrics
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serve(
    engine: FakeEngine,
    limits: HttpLimits | None = None,
    *,
    log_prompts: bool = False,
) -> Iterator[Served]:
    """The HTTP application under uvicorn, on a free port, in a thread with an event loop of its own."""
    metrics = Metrics(in_ray=False)
    metrics.watch(engine)
    app = build_http_app(engine, metrics, limits, log_prompts=log_prompts)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)
    thread.start()

    def is_started() -> bool:
        assert thread.is_alive(), "uvicorn did not start"
        return bool(server.started)

    wait_until("uvicorn has started", is_started, pause_s=0.01)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(engine, metrics, port)
    finally:
        server.should_exit = True
        thread.join(60)


def in_process(engine: Models, metrics: Metrics | None = None, **options: Any) -> httpx.AsyncClient:
    """A client of the HTTP application over `engine`, in this process. options: of `build_http_app`."""
    transport = httpx.ASGITransport(build_http_app(engine, metrics or Metrics(in_ray=False), **options))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120)


async def ask(engine: Models, path: str, body: dict[str, Any]) -> httpx.Response:
    async with in_process(engine) as client:
        return await client.post(path, json=body)


def canary(served: Served) -> None:
    """Check after a test that the server answers and that no sequence is left in the engine."""
    body = {"messages": [{"role": "user", "content": "Are you there?"}]}
    answer = http.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == served.engine.answer
    eventually(lambda: served.engine.num_open == 0)


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    wait_until("the condition in the caller's line", condition, timeout_s, 0.005)


def assert_error(answer: httpx.Response, status: int, code: str) -> dict[str, str | None]:
    """Check that an answer is an error in exactly OpenAI's shape without a traceback."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, str | None] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert error["message"]
    assert "Traceback" not in answer.text
    assert "pydantic" not in answer.text
    return error


def sse(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream's body; it must end with [DONE]."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text
    return [json.loads(event) for event in events[:-1]]
