"""The Ray actors of one group's ranks: created in their bundles, called concurrently, and ended."""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.driver.placement import actor_options, compute_threads, rank_bundle_indices
from cluster.driver.ray_calls import (
    answer_within,
    first_line,
    in_passing_thread,
    kill_actors,
    result_of,
    results_of_all,
)
from cluster.wire.process_end import end_process
from cluster.wire.rank_runner import LoadOrder
from cluster.wire.rank_status import RankIdentity, RankStatus
from cluster.wire.rank_worker import RankWorker
from llama_core.errors import RankFailure
from llama_core.rank_report import RankReport

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S: Final = 0.5  # a rank that does not answer a status call within this time is the one that hangs
OPTIONS: Final[dict[str, Any]] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 1}}
_POLL_S: Final = 0.5  # of the state of a node on which a process is to end
_PART_OF_GPU: Final = "MIG"  # how ids of instances of a divided GPU begin
RankActor: Any = ray.remote(**OPTIONS)(RankWorker)


def new_rank(
    placement_group: PlacementGroup,
    bundle_index: int,
    rank: int,
    world_size: int,
    resources: Mapping[str, float] | None = None,
) -> Any:
    """An actor in a bundle. It takes `resources` of the bundle; a standby process takes none, so that the rank can."""
    strategy = PlacementGroupSchedulingStrategy(placement_group, bundle_index)
    options = actor_options(resources or {})
    return RankActor.options(scheduling_strategy=strategy, **options).remote(rank, world_size)


class RankActors:
    """Rank r has the bundle with the r-th of `bundle_indices`, or bundle 1 + r if None, and takes it whole.

    standby: processes that become the ranks, in their order; without any, actors are created.
    """

    def __init__(
        self, placement_group: PlacementGroup, bundle_indices: Sequence[int] | None, standby: Sequence[Any]
    ) -> None:
        self.actors: list[Any] = []
        self.identities: dict[int, RankIdentity] = {}  # by rank, as each one answers
        self._placement_group = placement_group
        self._bundle_indices = bundle_indices
        self._standby = list(standby)
        self._num_standby = len(standby)
        self._num_threads: list[int] = []  # by rank

    def __len__(self) -> int:
        return len(self.actors)

    async def create(self) -> None:
        # Reading the bundles is a blocking call to Ray's control service.
        bundles = await in_passing_thread(lambda: self._placement_group.bundle_specs)
        indices = self._bundle_indices
        if indices is None:
            indices = rank_bundle_indices(len(bundles) - 1)
        world_size = len(indices)
        if world_size < 1:
            raise RankFailure("the placement group has no bundle for a rank")
        self._num_threads = [compute_threads(bundles, index) for index in indices]
        if self._standby:
            assert len(self._standby) == world_size
            self.actors, self._standby = self._standby, []
        else:
            self.actors = [
                new_rank(self._placement_group, index, rank, world_size, bundles[index])
                for rank, index in enumerate(indices)
            ]

    async def identify(self, epoch: int) -> None:
        """Raises RankFailure. Identities are kept one by one: `end` ends a known rank even if another never answers."""

        async def identify(rank: int) -> None:
            self.identities[rank] = await result_of(self.actors[rank].identify.remote(epoch, self._num_threads[rank]))

        await results_of_all([identify(rank) for rank in range(len(self.actors))], "starting")

    async def load(self, order: LoadOrder) -> list[RankReport]:
        """`RankControl.load` on every rank, with the GPUs that it is to see. Raises what `ray_calls.results_of_all` raises."""
        keeper = None if order.store_path else self.actors[0]
        calls = [actor.load.remote(order, self.visible_gpus(rank), keeper) for rank, actor in enumerate(self.actors)]
        return await results_of_all(calls, "loading")

    async def call(self, method: Callable[[Any], Awaitable[Any]], doing: str) -> list[Any]:
        """The results of `method(actor)`, in the order of the ranks. Raises what `ray_calls.results_of_all` raises."""
        return await results_of_all([method(actor) for actor in self.actors], doing)

    async def statuses(self, timeout_s: float) -> list[RankStatus | None]:
        """By rank; None for a rank that does not answer within `timeout_s`."""
        refs = [actor.status.remote() for actor in self.actors]
        return list(await asyncio.gather(*(answer_within(ref, timeout_s) for ref in refs)))

    async def first_silent(self, timeout_s: float) -> int:
        """Returns the first rank that has answered before and then no status call for `timeout_s`."""
        loop = asyncio.get_running_loop()
        heard = dict.fromkeys(range(self._num_standby), loop.time())  # standby processes have answered before
        while True:
            await asyncio.sleep(STATUS_TIMEOUT_S)
            now = loop.time()
            for rank, status in enumerate(await self.statuses(STATUS_TIMEOUT_S)):
                if rank not in self.identities and rank not in heard:
                    continue
                if status is not None or rank not in heard:
                    heard[rank] = now
                elif now - heard[rank] >= timeout_s:
                    return rank

    def listen_host(self) -> str | None:
        """None (a unix socket) if every rank is on the driver's node, else the driver's address for TLS."""
        driver_node = ray.get_runtime_context().get_node_id()
        identities = self.identities.values()
        if all(identity.node_id == driver_node for identity in identities):
            return None
        own: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return _shared_host(own, identities)

    def rank_0_host(self) -> str:
        """Rank 0's address for the other ranks: loopback unless one of them is on another host."""
        return _shared_host(self.identities[0].node_ip, self.identities.values())

    def visible_gpus(self, rank: int) -> tuple[str, ...]:
        """The GPUs that this rank's process is to see: those of all ranks on its node, in the order of the ranks.

        A GPU reaches another's memory only in a process that sees both, and all peers must number the GPUs alike. Ray shows
        each actor its own GPU only. GPUs of other replicas stay hidden, and so do the other parts of a divided GPU (MIG): CUDA
        shows a process one part only.
        """
        own = self.identities[rank]
        beside = (each for _, each in sorted(self.identities.items()) if each.node_id == own.node_id)
        found = tuple(dict.fromkeys(gpu for identity in beside for gpu in identity.share.gpu_ids))
        return own.share.gpu_ids if any(gpu.startswith(_PART_OF_GPU) for gpu in found) else found

    async def describe_progress(self) -> str:
        """How far each rank is, for the message of a start that took too long."""
        if not self.actors:
            return "no rank was created"
        words = []
        for rank, status in enumerate(await self.statuses(2 * STATUS_TIMEOUT_S)):
            if status is None:
                words.append(
                    f"rank {rank} does not answer" if rank in self.identities else f"rank {rank} is not placed"
                )
            elif status.bytes_total:
                words.append(f"rank {rank} {status.phase} ({status.bytes_loaded:,} of {status.bytes_total:,} bytes)")
            else:
                words.append(f"rank {rank} {status.phase}")
        return ", ".join(words)

    def name(self, rank: int | None) -> str:
        """For log lines."""
        identity = self.identities.get(rank) if rank is not None else None
        if identity is None:
            return "no rank" if rank is None else f"rank {rank}"
        return f"rank {rank} (pid {identity.process.pid} on {identity.node_ip})"

    async def end(self, epoch: int, patience_s: float, timeout_s: float) -> None:
        """Kill every actor and wait until the processes of all identified ranks are gone. Logs those that are not."""
        await in_passing_thread(kill_actors, self.actors + self._standby)
        known = list(self.identities.values())
        gone = await asyncio.gather(*(end_rank(identity, patience_s, timeout_s) for identity in known))
        for identity, is_gone in zip(known, gone, strict=True):
            if not is_gone:
                logger.error("epoch=%d the process of %s could not be ended", epoch, self.name(identity.rank))


def _shared_host(own_ip: str, identities: Iterable[RankIdentity]) -> str:
    """Where a process at `own_ip` listens for these ranks: loopback, of the same address family, if they are on its host."""
    if any(identity.node_ip != own_ip for identity in identities):
        return own_ip
    return "::1" if ipaddress.ip_address(own_ip).version == 6 else "127.0.0.1"


async def end_rank(identity: RankIdentity, patience_s: float, timeout_s: float) -> bool:
    """Give the process `patience_s` to end by itself, then kill it. Returns whether it is gone within `timeout_s` more.

    On another node a Ray task does this; a node that is lost has taken its processes with it.
    """
    timing = (identity.process, patience_s, timeout_s)
    if identity.node_id == ray.get_runtime_context().get_node_id():
        return await in_passing_thread(end_process, *timing)
    there = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    end_remotely = ray.remote(num_cpus=0, max_retries=0)(end_process).options(scheduling_strategy=there)
    ending = asyncio.create_task(result_of(end_remotely.remote(*timing)))
    losing = asyncio.create_task(_loss_of_node(identity.node_id))  # the task on a lost node may fail much later
    try:
        async with asyncio.timeout(timeout_s * 2):
            await asyncio.wait((ending, losing), return_when=asyncio.FIRST_COMPLETED)
        return losing.done() or bool(await ending)
    except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
        return True
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("rank %d: cannot run a task on its node to end it: %s", identity.rank, first_line(error))
        return False
    finally:
        ending.cancel()
        losing.cancel()


async def _loss_of_node(node_id: str) -> None:
    """Returns when Ray considers the node dead."""
    while True:
        with suppress(Exception):  # Ray did not answer: the node's state is unknown, which is no loss yet
            if not any(node["NodeID"] == node_id and node["Alive"] for node in await in_passing_thread(ray.nodes)):
                return
        await asyncio.sleep(_POLL_S)
