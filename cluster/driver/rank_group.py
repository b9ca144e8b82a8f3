"""One replica's ranks, started together, stepped together, ended together. Knows no HTTP and no scheduling.

Control goes by Ray calls (start, load, status), steps by sockets (`fan_out`). A rank that dies, hangs or raises ends
the group: every step in flight fails once with `RankFailure`, and no process is left. A group is started once. To
continue after a failure, await `stop()` and start another group over the same placement group with the next epoch. Every
message carries the epoch, so no answer of the old group is accepted by the new one.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup

from cluster.driver.fan_out import FanOut
from cluster.driver.group_info import GroupInfo, GroupLimits
from cluster.driver.rank_actors import STATUS_TIMEOUT_S, RankActors
from cluster.driver.ray_calls import first_line, result_of
from cluster.wire.messages import MAX_FRAME_BYTES, largest_step_bytes, longest_sequence
from cluster.wire.rank_runner import MODEL_RUNNER_FACTORY, LoadOrder, RunnerFactory
from cluster.wire.rank_status import RankStatus
from cluster.wire.socket_dir import SocketDir
from cluster.wire.transport import Invitation, RankConnection, RankListener
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError, RankFailure
from llama_core.rank_report import RankReport
from llama_core.remote.model_files import RemoteModel
from llama_core.scheduling.step import StepInput, StepOutput

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 60.0  # the ranks run by then, and each sends one small message
# Ray ends a running process within milliseconds and takes 5 s for a stopped one: after this time our SIGKILL ends it.
_PATIENCE_AFTER_FAILURE_S: Final = 0.1
_PATIENCE_WITH_HEALTHY_S: Final = 2.0


class RankGroup:
    """Takes steps (`submit`) and answers them in their order. Use it from one event loop, the one it was started in.

    bundle_indices, standby: see `RankActors`. runner_factory: makes a rank's runner. num_blocks: of the group that this one
    replaces, the most cache blocks to allocate; None: as many as every rank can hold. downloads: remote models that every
    node of the ranks must have.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement_group: PlacementGroup,
        *,
        epoch: int = 0,
        num_blocks: int | None = None,
        limits: GroupLimits | None = None,
        runner_factory: RunnerFactory = MODEL_RUNNER_FACTORY,
        bundle_indices: Sequence[int] | None = None,
        standby: Sequence[Any] = (),
        downloads: Sequence[RemoteModel] = (),
    ) -> None:
        assert num_blocks is None or num_blocks > 0
        self.epoch = epoch
        self.info: GroupInfo | None = None
        self.failure: RankFailure | None = None
        self.ranks = RankActors(placement_group, bundle_indices, standby)
        self._config = config
        self._context_limit: str | None = None
        self._num_blocks = num_blocks
        self._limits = limits or GroupLimits()
        self._runner_factory = runner_factory
        self._downloads = downloads
        self._deadline: asyncio.Timeout | None = None
        self._listener: RankListener | None = None
        self._store_dir: SocketDir | None = None  # of the ranks' rendezvous, on one host
        self._fan_out: FanOut | None = None
        self._failed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    @property
    def num_in_flight(self) -> int:
        """Steps that some rank has not answered yet."""
        return self._fan_out.num_in_flight if self._fan_out else 0

    async def start(self) -> GroupInfo:
        """Start, join and load every rank. On any failure no rank is left.

        Raises what a rank's factory raised if that is a LlamaError (CheckpointError, ConfigError), else RankFailure;
        ConfigError, before any rank is created, if a step of this configuration may be too long to send.
        """
        assert not self.ranks, "a group is started once"
        self._check_step_size()
        try:
            async with asyncio.timeout(self._limits.start_timeout_s) as self._deadline:
                self.info = await self._start_unless_silent()
        except TimeoutError:
            try:
                where = await self.ranks.describe_progress()
            finally:  # also where the start is cancelled while it asks the ranks
                await self.stop()
            raise RankFailure(f"the ranks were not ready within {self._limits.start_timeout_s:g} s: {where}") from None
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        return self.info

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        """Run one step on every rank. Steps run in the order of these calls, and several may be in flight. Raises
        RankFailure, as the future does; the group cannot be used after it.
        """
        if self._fan_out is None:
            raise RankFailure("the rank group is not started")
        return self._fan_out.submit(batch)

    async def statuses(self, timeout_s: float = 1.0) -> list[RankStatus | None]:
        """Each rank's progress, by rank; None for a rank that does not answer within `timeout_s`."""
        return await self.ranks.statuses(timeout_s)

    async def wait_failed(self) -> RankFailure:
        """Returns when the group has failed. `await stop()` to know that its processes are gone."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def stop(self) -> None:
        """End every rank and wait until its process is gone. Idempotent; also after a failure or half a start."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(graceful=True))
        await asyncio.shield(self._ending)

    async def _start_unless_silent(self) -> GroupInfo:
        """Start the ranks. Fails if a rank answers no status call for `step_timeout_s`."""
        starting = asyncio.create_task(self._start())
        listening = asyncio.create_task(self.ranks.first_silent(self._limits.step_timeout_s))
        try:
            await asyncio.wait((starting, listening), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
            rank = listening.result()
            text = f"rank {rank} hangs: no answer to a status call within {self._limits.step_timeout_s:g} s"
            raise RankFailure(text, rank=rank)
        finally:
            for task in (starting, listening):
                task.cancel()
            await asyncio.gather(starting, listening, return_exceptions=True)

    async def _start(self) -> GroupInfo:
        await self.ranks.create()
        await self.ranks.identify(self.epoch)
        if self._downloads:
            await self._fetch()
        listen_host = self.ranks.listen_host()
        self._listener = RankListener(self.epoch, len(self.ranks), listen_host)
        await self._connect(await self._listener.open())
        store_path = ""
        if listen_host is None:
            self._store_dir = SocketDir()
            store_path = str(self._store_dir.path / "store")
        order = LoadOrder(
            self._config,
            self._runner_factory,
            self.ranks.rank_0_host(),
            store_path,
            self._limits.start_timeout_s,
            former_blocks=self._num_blocks or 0,
        )
        loads = await self.ranks.load(order)
        loaded_s = time.monotonic()
        num_blocks = self._common_num_blocks(loads)
        await self.ranks.call(lambda actor: actor.prepare.remote(num_blocks), "warming up")
        self._serve(await self._listener.connections())
        identities = tuple(self.ranks.identities[rank] for rank in range(len(loads)))
        reports = tuple(
            replace(report, node=identity.node_ip, pid=identity.process.pid)
            for report, identity in zip(loads, identities, strict=True)
        )
        context = loads[0].max_seq_len
        limit = self._context_limit if context in (None, self._config.max_seq_len) else None
        return GroupInfo(self.epoch, num_blocks, reports, identities, context, limit, loaded_s)

    async def _fetch(self) -> None:
        """Without a deadline: a download takes as long as it takes, and fails by itself where nothing comes."""
        assert self._deadline is not None
        self._deadline.reschedule(None)
        await self.ranks.call(lambda actor: actor.fetch.remote(self._downloads), "fetching")
        self._deadline.reschedule(asyncio.get_running_loop().time() + self._limits.start_timeout_s)

    def _check_step_size(self) -> None:
        config = self._config
        if config.lowers_max_seq_len:
            longest = max(2, longest_sequence(config.max_batch_size, config.block_size))
            if longest < config.max_seq_len:
                config = self._config = replace(config, max_seq_len=longest)
                self._context_limit = f"what one step can send for {config.max_batch_size} sequences"
        need = largest_step_bytes(config.max_batch_size, config.max_seq_len, config.blocks_per_sequence)
        if need > MAX_FRAME_BYTES:
            raise ConfigError(
                f"max_batch_size {config.max_batch_size} with max_seq_len {config.max_seq_len} makes steps of up to "
                f"{need:,} bytes, the limit is {MAX_FRAME_BYTES:,}: lower one of them",
                param="max_batch_size",
            )

    def _common_num_blocks(self, loads: Sequence[RankReport]) -> int:
        """Cache blocks that every rank allocates: as many as all can hold, and at most as many as were asked for."""
        have = min(load.max_num_blocks for load in loads)
        return have if self._num_blocks is None else min(have, self._num_blocks)

    async def _connect(self, invitation: Invitation) -> None:
        assert self._listener is not None
        timeout_s = min(self._limits.start_timeout_s, _CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):
                await self.ranks.call(lambda actor: actor.connect.remote(invitation, timeout_s), "connecting")
                await self._listener.connections()  # from here on nothing listens and no socket file exists
        except TimeoutError:
            missing = [rank for rank, connection in enumerate(self._listener.joined) if connection is None]
            text = f"no valid connection from ranks {missing} within {timeout_s:g} s"
            raise RankFailure(text, rank=missing[0] if missing else None) from None

    def _serve(self, connections: Sequence[RankConnection]) -> None:
        serving = [actor.serve.remote() for actor in self.ranks.actors]
        self._fan_out = FanOut(
            connections,
            epoch=self.epoch,
            step_timeout_s=self._limits.step_timeout_s,
            on_failure=self._on_failure,
            on_overdue=lambda ranks, waited_s: self._spawn(self._name_hanging(ranks, waited_s)),
        )
        self._serving = [asyncio.create_task(self._watch(rank, ref)) for rank, ref in enumerate(serving)]
        if self.failure is not None:
            raise self.failure

    async def _watch(self, rank: int, ref: Any) -> None:
        """Report the end of a rank's `serve` call: Ray notices a process's end even where its connection stays open."""
        assert self._fan_out is not None
        try:
            await result_of(ref)
            reason = "stopped serving"
        except ray.exceptions.RayActorError as error:
            reason = f"died: {first_line(error)}"
        except Exception as error:
            reason = f"failed: {first_line(error)}"
        if self._ending is None:
            self._fan_out.note_failure_sign(rank, reason)

    async def _name_hanging(self, ranks: list[int], waited_s: float) -> None:
        """Of the ranks without an answer, name the one that hangs. It answers no status call either; the others only wait for
        it in a collective, and answer status calls from another thread.
        """
        assert self._fan_out is not None
        try:
            statuses = await self.statuses(STATUS_TIMEOUT_S)
            silent = [rank for rank in ranks if statuses[rank] is None]
        except Exception as error:  # the step is overdue whether or not Ray can tell why
            logger.warning("epoch=%d the state of the ranks is unknown: %s", self.epoch, first_line(error))
            silent = []
        deadline = f"no answer to a step within {waited_s:.3g} s"
        if silent:
            self._fan_out.note_failure_sign(silent[0], f"hangs: {deadline}, nor to a status call")
        else:
            self._fan_out.note_failure_sign(ranks[0], f"hangs: {deadline} (ranks without one: {ranks})")

    def _on_failure(self, failure: RankFailure) -> None:
        if self._ending is not None:
            return
        self.failure = failure
        logger.error("epoch=%d %s; %s", self.epoch, failure.message, self.ranks.name(failure.rank))
        self._ending = asyncio.create_task(self._end(graceful=False))
        self._failed.set()

    async def _end(self, *, graceful: bool) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._fan_out is not None:
            self._fan_out.fail(RankFailure("the rank group was stopped"))
        patience_s = _PATIENCE_AFTER_FAILURE_S
        if graceful and self._serving:
            # With their connections closed, healthy ranks leave `serve` and end by themselves, which Ray logs as normal.
            await asyncio.wait(self._serving, timeout=self._limits.stop_timeout_s)
            patience_s = _PATIENCE_WITH_HEALTHY_S
        await self.ranks.end(self.epoch, patience_s, self._limits.kill_timeout_s)
        if self._store_dir is not None:
            self._store_dir.remove()
        for task in [*self._serving, *self._tasks]:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
