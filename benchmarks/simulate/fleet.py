"""Engines and fronts of the product in one event loop with a virtual clock. Ranks are a model of their costs."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from benchmarks.simulate.workload import ANSWER
from cluster.driver.group_info import GroupInfo
from cluster.wire.rank_status import RankStatus
from deployments.args import EngineArgs, IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.interface import FLEET_EVENTS
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.service import LlamaService
from deployments.engine.timeline import Timeline
from deployments.fleet.served_model import ServedModel
from deployments.links import messages, model_files
from deployments.links.affinity import PrefixIndex
from deployments.links.front_server import FrontServer
from deployments.links.front_session import FrontSession, FrontStream
from deployments.links.link import Link
from llama_core.config import EngineConfig
from llama_core.errors import LlamaError, RankFailure, RequestCancelled
from llama_core.scheduling.request import FinishReason, Request
from llama_core.scheduling.request import Sequence as Seq
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape

DELAY_S: Final = 0.0001  # of a message


class Costs(NamedTuple):
    """Of a step, in milliseconds: base + token * tokens of prompts + row * decode rows."""

    base_ms: float
    token_ms: float
    row_ms: float

    def step_ms(self, shape: StepShape) -> float:
        return self.base_ms + self.token_ms * shape.num_prompt_tokens + self.row_ms * shape.num_decodes


class ModelledRanks:
    """Implements `deployments.engine.supervisor.Group` and `GroupPool`. A step begins when the one before it has ended."""

    num_standby = 0

    def __init__(self, costs: Costs, num_blocks: int) -> None:
        self.costs, self._num_blocks = costs, num_blocks
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

    async def start(self) -> GroupInfo:
        return GroupInfo(epoch=0, num_blocks=self._num_blocks, ranks=())

    async def statuses(self) -> list[RankStatus | None]:
        return []

    async def wait_failed(self) -> RankFailure:
        return await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        pass

    async def usable_bundles(self) -> list[int] | None:
        return None

    async def fetch(self) -> None:
        pass

    def open_group(self, config: EngineConfig, epoch: int, num_blocks: int | None, bundles: Sequence[int]) -> Any:
        return self

    def prepare_standby(self, info: GroupInfo) -> None:
        pass


def _answer(future: asyncio.Future[StepOutput], output: StepOutput) -> None:
    if not future.done():
        future.set_result(output)


class SimulatedEngine:
    """server: None until it has started. ended: sequences that it has completed."""

    def __init__(self, name: str, args: EngineArgs, costs: Costs, num_blocks: int) -> None:
        self.name = name
        self.ranks = ModelledRanks(costs, num_blocks)
        self.service = LlamaService(args, self.ranks, on_end=self._on_end)
        self.service.engine_id = name
        self.server: FrontServer | None = None
        self.num_ended = 0
        # Of streams that were sent to it and that it has not admitted: uncached tokens and blocks.
        self.waiting: dict[tuple[Link, int], tuple[int, int]] = {}
        self.pool: Any = None  # of perfect placement

    async def start(self) -> None:
        await self.service.start()
        self.server = FrontServer(self.service, _files(self.service.args))

    def _on_end(self, stream: MeasuredStream) -> None:
        self.num_ended += stream.sequence.finish_reason is FinishReason.LENGTH


@cache
def _packed(ckpt_dir: str) -> model_files.ModelFiles:
    return model_files.pack(EngineArgs(ckpt_dir=ckpt_dir), None, 1)


def _files(args: EngineArgs) -> model_files.ModelFiles:
    return _packed(args.ckpt_dir)


class _Pipe:
    """Calls `take` with each message, DELAY_S after `send`, in their order."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take, self._left = take, deque[Any]()

    def send(self, message: Any) -> None:
        self._left.append(message)
        asyncio.get_running_loop().call_later(DELAY_S, self._deliver)

    def _deliver(self) -> None:
        self._take(self._left.popleft())


class VirtualLink(Link):
    """A front's link with an engine: the messages are those of a connection, and no bytes."""

    def __init__(self, engine: SimulatedEngine, prefixes: PrefixIndex) -> None:
        assert engine.server is not None
        super().__init__(engine.name, "virtual", prefixes)
        self.engine, self.session = engine, VirtualSession(engine.server, self)
        self._pipe = _Pipe(self.session.take)

    def send(self, message: messages.FromFront) -> None:
        self._pipe.send(message)

    def close(self) -> None:
        self.session.close("the front has closed it")

    def hear(self, message: messages.FromEngine) -> None:
        self.note_heard()
        self.take(message)


class VirtualSession(FrontSession):
    def __init__(self, server: FrontServer, link: VirtualLink) -> None:
        super().__init__(server)
        self._server, self._link, self._pipe = server, link, _Pipe(link.hear)

    def send(self, message: messages.FromEngine) -> None:
        self._pipe.send(message)

    def admitted(self, stream: FrontStream) -> None:
        self._link.engine.waiting.pop((self._link, stream.number), None)
        super().admitted(stream)

    def cancel(self, numbers: Iterable[int], *, is_stop: bool = False) -> None:
        numbers = list(numbers)
        for number in numbers:
            self._link.engine.waiting.pop((self._link, number), None)
        super().cancel(numbers, is_stop=is_stop)

    def close(self, reason: str, level: int = logging.WARNING) -> None:
        if self._server.sessions.pop(self, self) is None:
            self.cancel(list(self.streams))
            asyncio.get_running_loop().call_later(DELAY_S, self._link.lose)


class CountedStream:
    """In the place of a `SequenceStream`: counts the tokens of a stream, and makes no text. `done`: set at its end."""

    def __init__(self, seq: Seq, tokenizer: Any, request: Request, on_cancel: Callable[[Seq], None], **_: Any) -> None:
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

    def end(self, error: LlamaError) -> None:
        self._on_cancel(self.sequence)
        self.fail(error)

    def cancel(self) -> None:
        self.end(RequestCancelled("the request was cancelled"))

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class SimulatedFront:
    """num_open: requests that it has now."""

    def __init__(self, policy: str, model: type[ServedModel] = ServedModel, link: type[VirtualLink] = VirtualLink) -> None:
        tells: tuple[Any, ...] = (dict.fromkeys(FLEET_EVENTS, 0), lambda link: None, lambda: None)
        own = "model", Callers(IngressArgs()), None, lambda stream: None
        self._link = link
        self.model = model(*own, 600.0, *tells, policy)
        self.prefixes = PrefixIndex()
        self.num_open = 0

    async def meet(self, engine: SimulatedEngine) -> None:
        assert engine.server is not None
        link = self._link(engine, self.prefixes)
        engine.server.join(link.session)
        while link.welcome is None:
            await asyncio.sleep(DELAY_S)
        link.tokenizer_digest = link.welcome.tokenizer_digest
        self.model.add(link, engine.service.text)
