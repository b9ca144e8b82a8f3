"""Opens one replica's rank groups, one after the other, and keeps the warm standby processes that become the next group.

Importing torch is the longest part of a rank's start. A standby process, beside each rank in the rank's own bundle, has
imported it already; it takes memory and no CPU time. Ray ends it with the replica that owns it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.driver.group_info import GroupInfo, GroupLimits
from cluster.driver.placement import FIRST_RANK_BUNDLE, rank_bundle_indices
from cluster.driver.rank_actors import new_rank
from cluster.driver.rank_group import RankGroup
from cluster.driver.ray_calls import (
    answer_within,
    first_line,
    in_passing_thread,
    kill_actors,
    result_of,
    results_of_all,
)
from cluster.wire.rank_runner import MODEL_RUNNER_FACTORY, RunnerFactory
from llama_core.config import EngineConfig
from llama_core.remote.model_files import RemoteModel

logger = logging.getLogger(__name__)

CHECK_PERIOD_S: Final = 30.0
STATUS_TIMEOUT_S: Final = 5.0
LONGEST_RETRY_S: Final = 600.0  # between two attempts to create them, where memory is short
START_DELAY_S: Final = 5.0  # after the ranks serve: the first requests come before the standby processes
_TABLES_TIMEOUT_S: Final = 5.0


class StandbyPool:
    """Opens one group after the other over one placement group. enabled: keep a warm standby process beside each rank."""

    def __init__(
        self,
        placement_group: PlacementGroup,
        limits: GroupLimits,
        *,
        enabled: bool,
        runner_factory: RunnerFactory = MODEL_RUNNER_FACTORY,
        downloads: Sequence[RemoteModel] = (),
    ) -> None:
        """downloads: remote models that every node of the ranks must have."""
        self._downloads = downloads
        self._placement_group = placement_group
        self._limits = limits
        self._runner_factory = runner_factory
        self._enabled = enabled
        self._standby: list[Any] = []
        self._is_ready = False
        self._preparing: asyncio.Task[None] | None = None
        self._discarding: set[asyncio.Task[None]] = set()
        self._bundle_indices: list[int] | None = None  # of the group opened last

    @property
    def num_standby(self) -> int:
        """Processes that could take over now."""
        return len(self._standby) if self._is_ready else 0

    async def usable_bundles(self) -> list[int] | None:
        """Indices of the rank bundles whose node is alive; None if Ray's control service does not answer."""
        try:
            async with asyncio.timeout(_TABLES_TIMEOUT_S):
                return await in_passing_thread(self._bundles_on_living_nodes)
        except Exception as error:  # the caller continues without this answer
            logger.warning("the list of living nodes is unknown: %s", first_line(error))
            return None

    def _bundles_on_living_nodes(self) -> list[int]:
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        nodes: dict[int, str] = placement_group_table(self._placement_group)["bundles_to_node_id"]
        return [index for index in sorted(nodes) if index >= FIRST_RANK_BUNDLE and nodes[index] in living]

    async def fetch(self) -> None:
        """Have the remote models on the nodes of all bundles, while ranks serve. Raises what `results_of_all` raises."""
        if not self._downloads:
            return
        fetch = ray.remote(num_cpus=0, max_retries=0)(_fetch)
        indices = await self.usable_bundles() or ()
        places = (PlacementGroupSchedulingStrategy(self._placement_group, index) for index in indices)
        fetching = [fetch.options(scheduling_strategy=place).remote(self._downloads) for place in places]
        await results_of_all([result_of(each) for each in fetching], "fetching")

    def open_group(
        self, config: EngineConfig, epoch: int, num_blocks: int | None, bundle_indices: Sequence[int] | None = None
    ) -> RankGroup:
        """An unstarted group in these bundles, or in all. It uses the standby processes if they are ready there."""
        indices = list(bundle_indices) if bundle_indices is not None else None
        standby: list[Any] = []
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        if self._is_ready and indices == self._bundle_indices:
            standby, self._standby = self._standby, []
        else:  # processes that are not ready may be on other nodes than the next ranks
            unready, self._standby = self._standby, []
            discarding = asyncio.create_task(in_passing_thread(kill_actors, unready))
            self._discarding.add(discarding)
            discarding.add_done_callback(self._discarding.discard)
        self._bundle_indices, self._is_ready = indices, False
        return RankGroup(
            config,
            self._placement_group,
            epoch=epoch,
            num_blocks=num_blocks,
            limits=self._limits,
            runner_factory=self._runner_factory,
            bundle_indices=indices,
            standby=standby,
            downloads=self._downloads,
        )

    def prepare_standby(self, info: GroupInfo) -> None:
        """Start, in the background, the processes that replace the ranks of `info` if those fail."""
        if self._enabled and self._preparing is None:
            self._preparing = asyncio.create_task(self._keep_ready(info))

    async def stop(self) -> None:
        """End the standby processes. Idempotent."""
        self._enabled = False
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        await asyncio.gather(*self._discarding, return_exceptions=True)
        await self._discard()

    async def _keep_ready(self, info: GroupInfo) -> None:
        """Create standby processes, check them, and replace all when one has ended, until a group takes them."""
        retry_s = CHECK_PERIOD_S
        await asyncio.sleep(START_DELAY_S)
        while True:
            try:
                self._is_ready = self._is_ready or await self._create(info)
            except Exception as error:
                logger.warning("no standby processes: %s", first_line(error))
            if self._is_ready:
                retry_s = CHECK_PERIOD_S
                await asyncio.sleep(CHECK_PERIOD_S)
                statuses = (answer_within(actor.status.remote(), STATUS_TIMEOUT_S) for actor in self._standby)
                self._is_ready = all(await asyncio.gather(*statuses))
            if not self._is_ready:
                await self._discard()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _create(self, info: GroupInfo) -> bool:
        """Returns whether all are ready. A process refuses where its host is short of memory."""
        world_size = len(info.ranks)
        indices = self._bundle_indices if self._bundle_indices is not None else rank_bundle_indices(world_size)
        self._standby = [new_rank(self._placement_group, index, rank, world_size) for rank, index in enumerate(indices)]
        shares = [identity.share for identity in info.identities]
        preloading = [actor.preload.remote(share) for actor, share in zip(self._standby, shares, strict=True)]
        return all(await asyncio.gather(*map(result_of, preloading)))

    async def _discard(self) -> None:
        standby, self._standby = self._standby, []
        await in_passing_thread(kill_actors, standby)


def _fetch(downloads: Sequence[RemoteModel]) -> None:
    from llama_core.remote.store import fetch

    for model in downloads:
        fetch(model)
