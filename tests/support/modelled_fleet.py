"""The product's engines and fronts in one event loop with a virtual clock, for hours of traffic.

Ranks are a model of their costs, a link carries its messages as objects, and streams make no text.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

from deployments.args import EngineArgs, IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.interface import FLEET_EVENTS
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.timeline import Timeline
from deployments.fleet.served_model import ServedModel
from deployments.links import messages, model_files
from deployments.links.affinity import PrefixIndex
from deployments.links.front_server import FrontServer
from deployments.links.front_session import FrontSession, FrontStream
from deployments.links.link import Link, RoutedStream
from deployments.observe.metrics import Metrics
from deployments.replicas.engine_process import EngineProcess
from llama_core.errors import LlamaError, RequestCancelled
from llama_core.scheduling.request import FinishReason, Request, Sequence
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape
from tests.support.fake_cluster import FakeCluster, Member
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool

ANSWER: Final = 300  # the token that ranks sample; it ends no answer
DELAY_S: Final = 0.0001  # of a message


def ignore(*_: object) -> None:
    """In the place of a callback."""


class Costs(NamedTuple):
    """Of a step, in milliseconds: base + token * tokens of prompts + row * decode rows."""

    base_ms: float
    token_ms: float
    row_ms: float

    def step_ms(self, shape: StepShape) -> float:
        return self.base_ms + self.token_ms * shape.num_prompt_tokens + self.row_ms * shape.num_decodes


class ModelledRanks(FakeGroup):
    """A step begins when the one before it has ended."""

    def __init__(self, costs: Costs, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self.costs = costs
        self.busy_s = self._free_at_s = 0.0

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        loop = asyncio.get_running_loop()
        elapsed_ms = self.costs.step_ms(StepShape.of(batch))
        self.busy_s += elapsed_ms / 1e3
        self._free_at_s = max(self._free_at_s, loop.time()) + elapsed_ms / 1e3
        output = StepOutput(batch.epoch, batch.step, [ANSWER] * batch.num_samples, elapsed_ms=elapsed_ms)
        future: asyncio.Future[StepOutput] = loop.create_future()
        loop.call_at(self._free_at_s, _answer, future, output)
        return future


def _answer(future: asyncio.Future[StepOutput], output: StepOutput) -> None:
    if not future.done():
        future.set_result(output)


class ModelledEngine:
    """waiting: of streams that it was sent and has not admitted, uncached tokens and blocks, where somebody counts them."""

    def __init__(self, name: str, args: EngineArgs, ranks: Any) -> None:
        """ranks: `ModelledRanks`, or another FakeGroup."""
        self.name, self.ranks = name, ranks
        self.num_ended = 0
        self.waiting: dict[tuple[Link, int], tuple[int, int]] = {}
        unread = ("watch", "on_step", "on_compute_ms", "on_failure")
        metrics = cast(Metrics, SimpleNamespace(**dict.fromkeys(unread, ignore), on_end=self._on_end))
        self.process = EngineProcess(args, FakeGroupPool(lambda: self.ranks), Member(FakeCluster()), metrics)
        self.service = self.process.service
        self.service.engine_id = name

    async def start(self) -> None:
        await self.service.start()
        self.process.fronts = FrontServer(self.service, _packed(self.service.args.ckpt_dir))

    @property
    def server(self) -> FrontServer:
        assert self.process.fronts is not None
        return self.process.fronts

    @property
    def num_sequences(self) -> int:
        scheduler = self.service.loop.scheduler
        return scheduler.num_running + scheduler.num_waiting

    async def end(self) -> None:
        """Its streams go to others."""
        await self.server.hand_over(has_successor=False, timeout_s=60.0)
        self.server.close()
        await self.service.stop()

    def _on_end(self, stream: MeasuredStream) -> None:
        self.num_ended += stream.sequence.finish_reason is FinishReason.LENGTH


@cache
def _packed(ckpt_dir: str) -> model_files.ModelFiles:
    return model_files.pack(EngineArgs(ckpt_dir=ckpt_dir), None, 1)


class _Pipe:
    """Calls `take` with each message, DELAY_S after `send`, in their order."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take, self._left = take, deque[Any]()

    def send(self, message: Any) -> None:
        self._left.append(message)
        asyncio.get_running_loop().call_later(DELAY_S, self._deliver)

    def _deliver(self) -> None:
        self._take(self._left.popleft())


class ModelledLink(Link):
    def __init__(self, engine: ModelledEngine, prefixes: PrefixIndex, on_sent: "OnSent") -> None:
        super().__init__(engine.name, "virtual", prefixes)
        self.engine, self.session, self._on_sent = engine, _Session(engine.server, self), on_sent
        self._pipe = _Pipe(self.session.take)

    def take_on(self, live: RoutedStream) -> None:
        super().take_on(live)
        self._on_sent(live, self)

    def send(self, message: messages.FromFront) -> None:
        self._pipe.send(message)

    def close(self) -> None:
        self.session.close("the front has closed it")

    def hear(self, message: messages.FromEngine | None) -> None:
        """message: None is the end."""
        if message is None:
            self.lose()
        else:
            self.note_heard()
            self.take(message)


OnSent = Callable[[RoutedStream, ModelledLink], object]


class _Session(FrontSession):
    def __init__(self, server: FrontServer, link: ModelledLink) -> None:
        super().__init__(server)
        self._sessions, self._link, self._pipe = server.sessions, link, _Pipe(link.hear)

    def send(self, message: messages.FromEngine) -> None:
        self._pipe.send(message)

    def admitted(self, stream: FrontStream) -> None:
        self._link.engine.waiting.pop((self._link, stream.number), None)
        super().admitted(stream)

    def cancel(self, numbers: Iterable[int], *, is_stop: bool = False) -> None:
        for number in (gone := list(numbers)):
            self._link.engine.waiting.pop((self._link, number), None)
        super().cancel(gone, is_stop=is_stop)

    def close(self, reason: str, level: int = logging.WARNING) -> None:
        if self in self._sessions:
            del self._sessions[self]
            self.cancel(self.streams)
            self._pipe.send(None)


class CountedStream:
    """In the place of a `SequenceStream`. `done`: set at its end."""

    def __init__(
        self, seq: Sequence, tokenizer: Any, request: Request, on_cancel: Callable[[Sequence], None], **_: Any
    ):
        loop = asyncio.get_running_loop()
        self.sequence, self._on_cancel = seq, on_cancel
        self.numerics = self.tokenizer_digest = ""
        self.timeline = Timeline(loop.time())
        self.error: LlamaError | None = None
        self.done: asyncio.Future[None] = loop.create_future()

    @property
    def ended(self) -> bool:
        return self.sequence.finish_reason is not None or self.error is not None

    def push(self, tokens: list[int]) -> bool:
        if self.sequence.finish_reason is not None:
            self._end()
        return False

    def fail(self, error: LlamaError) -> None:
        self.error = self.error or error
        self._end()

    def cancel(self) -> None:
        self._on_cancel(self.sequence)
        self.fail(RequestCancelled("the request was cancelled"))

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class ModelledFront:
    """num_open: requests that it has now."""

    def __init__(self, policy: str, make: Callable[..., ServedModel] = ServedModel, on_sent: OnSent = ignore) -> None:
        """on_sent: told which stream each engine gets."""
        tells = dict.fromkeys(FLEET_EVENTS, 0), ignore, ignore, policy
        self.model = make("model", Callers(IngressArgs()), None, ignore, 600.0, *tells)
        self.num_open = 0
        self._prefixes, self._on_sent = PrefixIndex(), on_sent

    async def meet(self, engine: ModelledEngine) -> None:
        link = ModelledLink(engine, self._prefixes, self._on_sent)
        engine.server.join(link.session)
        while link.welcome is None:  # noqa: ASYNC110
            await asyncio.sleep(DELAY_S)
        link.tokenizer_digest = link.welcome.tokenizer_digest
        self.model.add(link, engine.service.text)
