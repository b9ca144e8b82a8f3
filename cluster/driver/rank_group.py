"""One replica's ranks, started together, stepped together, ended together. Knows no HTTP and no scheduling.

Control goes by Ray calls (start, load, status), steps by sockets (`fan_out`). A rank that dies, hangs or raises ends
the group: every step in flight fails once with `RankFailure`, and no process is left. A group is started once. To go
on after a failure, await `stop()` and start another over the same placement group with the next epoch; every message
carries the epoch, so nothing of the old group can be taken for an answer of the new one.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.driver.fan_out import FanOut
from cluster.driver.placement import FIRST_RANK_BUNDLE, rank_bundle_index
from cluster.driver.rank_actor import new_rank
from cluster.driver.ray_calls import (
    answer_within,
    first_line,
    in_passing_thread,
    kill_actors,
    result_of,
    results_of_all,
)
from cluster.rank.rank_worker import RankIdentity, RankLoad, RankStatus
from cluster.rank.runner_factory import RunnerFactory, load_model_runner
from cluster.wire.messages import MAX_FRAME_BYTES, largest_step_bytes
from cluster.wire.process_end import end_process
from cluster.wire.transport import Invitation, RankConnection, RankListener
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError, RankFailure
from llama_core.scheduling.step import StepInput, StepOutput

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 60.0  # the ranks run by then, and it is one small message from each
_PROBE_S: Final = 0.5  # a rank that does not answer a status call for so long is the one that hangs
# Ray ends a running process within milliseconds, and takes 5 s for a stopped one: after so long it is our SIGKILL.
_PATIENCE_AFTER_FAILURE_S: Final = 0.1
_PATIENCE_WITH_HEALTHY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Deadlines in seconds. A step's counts from when it is the oldest unanswered one; on GPUs a first step may compile. It
    is `step_timeout_s` at most, and less once it is known what these ranks need (`fan_out.py`).
    """

    start_timeout_s: float = 600.0
    step_timeout_s: float = 60.0
    stop_timeout_s: float = 5.0
    kill_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class RankReport:
    identity: RankIdentity
    load: RankLoad


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A started group. `num_blocks` is the cache's size in blocks, the same on every rank."""

    epoch: int
    num_blocks: int
    ranks: tuple[RankReport, ...]


class RankGroup:
    """Takes steps (`submit`) and answers them in their order. Use it from one event loop, the one it was started in.

    Rank r has the bundle of seats[r] in `placement_group`, or of seat r if there are no `seats`, and takes it whole.
    `runner_factory` makes what a rank runs.
    `num_blocks` is how many cache blocks to allocate at most, for a group that takes another's place; None takes as many
    as every rank can hold. `spares` are processes that become the ranks, in their order; without any they are created.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement_group: PlacementGroup,
        *,
        epoch: int = 0,
        num_blocks: int | None = None,
        limits: GroupLimits | None = None,
        runner_factory: RunnerFactory = load_model_runner,
        seats: Sequence[int] | None = None,
        spares: Sequence[Any] = (),
    ) -> None:
        assert num_blocks is None or num_blocks > 0
        self.epoch = epoch
        self.info: GroupInfo | None = None
        self.failure: RankFailure | None = None
        self._config = config
        self._placement_group = placement_group
        self._num_blocks = num_blocks
        self._limits = limits or GroupLimits()
        self._runner_factory = runner_factory
        self._seats = seats
        self._spares = list(spares)
        self._actors: list[Any] = []
        self._identities: dict[int, RankIdentity] = {}  # by rank, as they become known
        self._listener: RankListener | None = None
        self._fan_out: FanOut | None = None
        self._failed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        return self.info is not None and self.failure is None and self._ending is None

    @property
    def num_in_flight(self) -> int:
        """Steps that some rank has not answered yet."""
        return self._fan_out.num_in_flight if self._fan_out else 0

    async def start(self) -> GroupInfo:
        """Starts, joins and loads every rank. On any failure no rank is left.

        Raises what a rank's factory raised if that is a LlamaError (CheckpointError, ConfigError), else RankFailure;
        ConfigError, before any rank is created, if a step of this configuration may be too long to send.
        """
        assert not self._actors, "a group is started once"
        self._check_step_size()
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                self.info = await self._start_unless_silent()
        except TimeoutError:
            try:
                where = await self._where_ranks_are()
            finally:  # also when it is cancelled while it asks
                await self.stop()
            raise RankFailure(f"the ranks were not ready within {self._limits.start_timeout_s:g} s: {where}") from None
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        return self.info

    async def step(self, batch: StepInput) -> StepOutput:
        """Runs one step on every rank. Raises RankFailure, after which the group is of no more use."""
        return await self.submit(batch)

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        """`step` without waiting: what is submitted runs in that order, and several steps may be on their way."""
        if self._fan_out is None:
            raise RankFailure("the rank group is not started")
        return self._fan_out.submit(batch)

    async def statuses(self, timeout_s: float = 1.0) -> list[RankStatus | None]:
        """How far each rank is, by rank; None for one that does not say within `timeout_s`. For use while it loads."""
        refs = [actor.status.remote() for actor in self._actors]
        return list(await asyncio.gather(*(answer_within(ref, timeout_s) for ref in refs)))

    async def wait_failed(self) -> RankFailure:
        """Returns when the group has failed. `await stop()` to know that its processes are gone."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def stop(self) -> None:
        """Ends every rank and waits until its process is gone. Idempotent; also after a failure or half a start."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(graceful=True))
        await asyncio.shield(self._ending)

    async def _start_unless_silent(self) -> GroupInfo:
        """A rank that does not even answer a status call for as long as a step may take will not come up."""
        starting = asyncio.create_task(self._start())
        listening = asyncio.create_task(self._first_silent())
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

    async def _first_silent(self) -> int:
        """The first rank which stops to answer, of those that have begun to. Spares have, before they were taken."""
        loop = asyncio.get_running_loop()
        heard = dict.fromkeys(range(len(self._spares)), loop.time())
        while True:
            await asyncio.sleep(_PROBE_S)
            now = loop.time()
            for rank, status in enumerate(await self.statuses(_PROBE_S)):
                if rank not in self._identities and rank not in heard:
                    continue
                if status is not None or rank not in heard:
                    heard[rank] = now
                elif now - heard[rank] >= self._limits.step_timeout_s:
                    return rank

    async def _start(self) -> GroupInfo:
        # Reading the bundles is a blocking call to Ray's control service.
        bundles = await in_passing_thread(lambda: self._placement_group.bundle_specs)
        seats = self._seats if self._seats is not None else range(len(bundles) - FIRST_RANK_BUNDLE)
        world_size = len(seats)
        if world_size < 1:
            raise RankFailure("the placement group has no bundle for a rank")
        if self._spares:
            assert len(self._spares) == world_size
            self._actors, self._spares = self._spares, []
        else:
            self._actors = [
                new_rank(self._placement_group, seat, rank, world_size, bundles[rank_bundle_index(seat)])
                for rank, seat in enumerate(seats)
            ]
        await results_of_all([self._identify(rank) for rank in range(world_size)], "starting")

        store_host = self._shared_host()
        self._listener = RankListener(self.epoch, world_size, self._listen_host())
        await self._connect(await self._listener.open())
        (store_port,) = await results_of_all([self._actors[0].offer_store.remote(store_host)], "listening")
        timeout_s = self._limits.start_timeout_s
        seat = (self._config, store_host, store_port, timeout_s, self._runner_factory)
        loads: list[RankLoad] = await results_of_all([actor.load.remote(*seat) for actor in self._actors], "loading")
        num_blocks = self._common_num_blocks(loads)
        await results_of_all([actor.prepare.remote(num_blocks) for actor in self._actors], "warming up")
        await self._serve(await self._listener.connections())
        reports = tuple(RankReport(self._identities[rank], load) for rank, load in enumerate(loads))
        return GroupInfo(self.epoch, num_blocks, reports)

    def _check_step_size(self) -> None:
        config = self._config
        need = largest_step_bytes(config.max_batch_size, config.max_seq_len, config.blocks_per_sequence)
        if need > MAX_FRAME_BYTES:
            raise ConfigError(
                f"max_batch_size {config.max_batch_size} with max_seq_len {config.max_seq_len} makes steps of up to "
                f"{need:,} bytes, the limit is {MAX_FRAME_BYTES:,}: lower one of them",
                param="max_batch_size",
            )

    async def _identify(self, rank: int) -> None:
        """Each rank is known as soon as it answers, so that it is ended for certain even if another never does."""
        self._identities[rank] = await result_of(self._actors[rank].identify.remote(self.epoch))

    def _common_num_blocks(self, loads: Sequence[RankLoad]) -> int:
        """How many cache blocks every rank allocates: as many as all can hold, and no more than are asked for."""
        have = min(load.max_num_blocks for load in loads)
        return have if self._num_blocks is None else min(have, self._num_blocks)

    async def _connect(self, invitation: Invitation) -> None:
        assert self._listener is not None
        timeout_s = min(self._limits.start_timeout_s, _CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):
                connecting = [actor.connect.remote(invitation, timeout_s) for actor in self._actors]
                await results_of_all(connecting, "connecting")
                await self._listener.connections()  # from here on nothing listens and no socket file exists
        except TimeoutError:
            missing = self._listener.missing_ranks
            text = f"no valid connection from ranks {missing} within {timeout_s:g} s"
            raise RankFailure(text, rank=missing[0] if missing else None) from None

    async def _serve(self, connections: Sequence[RankConnection]) -> None:
        serving = [actor.serve.remote() for actor in self._actors]
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

    def _listen_host(self) -> str | None:
        """None (a unix socket) if every rank is on the driver's node, else the driver's address for TLS."""
        driver_node = ray.get_runtime_context().get_node_id()
        if all(identity.node_id == driver_node for identity in self._identities.values()):
            return None
        own = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return LOOPBACK if all(identity.node_ip == own for identity in self._identities.values()) else own

    def _shared_host(self) -> str:
        """Where rank 0 listens for the others: loopback unless they are on another host than it is."""
        first = self._identities[0].node_ip
        return LOOPBACK if all(identity.node_ip == first for identity in self._identities.values()) else first

    async def _watch(self, rank: int, ref: Any) -> None:
        """Ray tells of a process's end as soon as the connection does, and also of one whose connection stays open."""
        assert self._fan_out is not None
        try:
            await result_of(ref)
            reason = "stopped serving"
        except ray.exceptions.RayActorError as error:
            reason = f"died: {first_line(error)}"
        except Exception as error:
            reason = f"failed: {first_line(error)}"
        if self._ending is None:
            self._fan_out.suspect(rank, reason)

    async def _name_hanging(self, ranks: list[int], waited_s: float) -> None:
        """Of the ranks that owe an answer, all but one may only be waiting for that one: it is the one that is silent
        to Ray too.
        """
        assert self._fan_out is not None
        try:
            statuses = await self.statuses(_PROBE_S)
            silent = [rank for rank in ranks if statuses[rank] is None]
        except Exception as error:  # the step is overdue whether or not Ray can say why
            logger.warning("epoch=%d the ranks' state is not known: %s", self.epoch, first_line(error))
            silent = []
        deadline = f"no answer to a step within {waited_s:.3g} s"
        if silent:
            self._fan_out.suspect(silent[0], f"hangs: {deadline}, nor to a status call")
        else:
            self._fan_out.suspect(ranks[0], f"hangs: {deadline} (ranks without one: {ranks})")

    def _on_failure(self, failure: RankFailure) -> None:
        if self._ending is not None:
            return
        self.failure = failure
        rank = failure.rank
        logger.error("epoch=%d %s; %s", self.epoch, failure.message, "no rank" if rank is None else self._name(rank))
        self._ending = asyncio.create_task(self._end(graceful=False))
        self._failed.set()

    async def _end(self, *, graceful: bool) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._fan_out is not None:
            self._fan_out.fail(RankFailure("the rank group was stopped"))
        patience_s = _PATIENCE_AFTER_FAILURE_S
        if graceful and self._serving:
            # Their connections are closed: healthy ranks leave `serve` and end by themselves, in an order that Ray
            # knows.
            await asyncio.wait(self._serving, timeout=self._limits.stop_timeout_s)
            patience_s = _PATIENCE_WITH_HEALTHY_S
        await in_passing_thread(kill_actors, self._actors + self._spares)
        known = list(self._identities.values())
        gone = await asyncio.gather(*(self._end_process(identity, patience_s) for identity in known))
        for identity, is_gone in zip(known, gone, strict=True):
            if not is_gone:
                logger.error("epoch=%d %s could not be ended", self.epoch, self._name(identity.rank))
        for task in [*self._serving, *self._tasks]:
            task.cancel()

    async def _end_process(self, identity: RankIdentity, patience_s: float) -> bool:
        """Whether the process is gone. On another node a task of Ray's does it; a node that is gone took its
        processes along.
        """
        timing = (identity.process, patience_s, self._limits.kill_timeout_s)
        if identity.node_id == ray.get_runtime_context().get_node_id():
            return await in_passing_thread(end_process, *timing)
        there = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
        ender = ray.remote(num_cpus=0, max_retries=0)(end_process).options(scheduling_strategy=there)
        ending = asyncio.create_task(result_of(ender.remote(*timing)))
        losing = asyncio.create_task(_loss_of_node(identity.node_id))  # of which a task there may learn much later
        try:
            async with asyncio.timeout(self._limits.kill_timeout_s * 2):
                await asyncio.wait((ending, losing), return_when=asyncio.FIRST_COMPLETED)
            return losing.done() or bool(await ending)
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
            return True
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("rank %d: its node could not be asked to end it: %s", identity.rank, first_line(error))
            return False
        finally:
            ending.cancel()
            losing.cancel()

    async def _where_ranks_are(self) -> str:
        """For the message of a start that took too long."""
        if not self._actors:
            return "no rank was created"
        words = []
        for rank, status in enumerate(await self.statuses()):
            if status is None:
                words.append(
                    f"rank {rank} does not answer" if rank in self._identities else f"rank {rank} is not placed"
                )
            elif status.bytes_total:
                words.append(f"rank {rank} {status.phase} ({status.bytes_loaded:,} of {status.bytes_total:,} bytes)")
            else:
                words.append(f"rank {rank} {status.phase}")
        return ", ".join(words)

    def _name(self, rank: int) -> str:
        identity = self._identities.get(rank)
        if identity is None:
            return f"rank {rank}"
        return f"rank {rank} (pid {identity.process.pid} on {identity.node_ip})"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _loss_of_node(node_id: str) -> None:
    """Returns when Ray takes the node for dead."""
    while True:
        with suppress(Exception):  # nobody knows: that is no loss yet
            if not any(node["NodeID"] == node_id and node["Alive"] for node in await in_passing_thread(ray.nodes)):
                return
        await asyncio.sleep(_PROBE_S)
