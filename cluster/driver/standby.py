"""The groups of ranks that one replica has one after the other, and the spare processes from which the next is made.

What takes a new process longest is importing torch. A spare has done that beforehand, beside each rank, in the rank's own
bundle, where it takes memory and no time. Ray ends it with the replica that owns it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.driver.placement import FIRST_RANK_BUNDLE
from cluster.driver.rank_actor import new_rank
from cluster.driver.rank_group import GroupInfo, GroupLimits, RankGroup
from cluster.driver.ray_calls import answer_within, first_line, in_passing_thread, kill_actors, result_of
from cluster.rank.runner_factory import RunnerFactory, load_model_runner
from llama_core.config import EngineConfig

logger = logging.getLogger(__name__)

LOOK_AFTER_THEM_EVERY_S: Final = 30.0
_TABLES_TIMEOUT_S: Final = 5.0
LONGEST_WAIT_S: Final = 600.0  # between two tries to make them, where memory is short
SPARES_AFTER_S: Final = 5.0  # once the ranks serve: whoever waits for the server comes first


class RankGroups:
    """Opens one group after the other over one placement group. `spares`: keep a process ready for each rank."""

    def __init__(
        self,
        placement_group: PlacementGroup,
        limits: GroupLimits,
        *,
        spares: bool,
        runner_factory: RunnerFactory = load_model_runner,
    ) -> None:
        self._placement_group = placement_group
        self._limits = limits
        self._runner_factory = runner_factory
        self._wants_spares = spares
        self._spares: list[Any] = []
        self._are_ready = False
        self._preparing: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # spares that nobody needs any more
        self._seats: list[int] | None = None  # of the group opened last

    @property
    def num_spares(self) -> int:
        """That could take over now."""
        return len(self._spares) if self._are_ready else 0

    async def seats(self) -> list[int] | None:
        """Those whose node lives; None where Ray's control service does not say."""
        try:
            async with asyncio.timeout(_TABLES_TIMEOUT_S):
                return await in_passing_thread(self._living_seats)
        except Exception as error:  # it is not worth failing for
            logger.warning("which nodes live is not known: %s", first_line(error))
            return None

    def _living_seats(self) -> list[int]:
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        nodes: dict[int, str] = placement_group_table(self._placement_group)["bundles_to_node_id"]
        return [i - FIRST_RANK_BUNDLE for i in sorted(nodes) if i >= FIRST_RANK_BUNDLE and nodes[i] in living]

    def open(
        self, config: EngineConfig, epoch: int, num_blocks: int | None, seats: Sequence[int] | None = None
    ) -> RankGroup:
        """A group that has not started, in these `seats` or in all, made of the spares if they are ready there."""
        seats = list(seats) if seats is not None else None
        spares: list[Any] = []
        sit_elsewhere = seats != self._seats
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        if self._are_ready and not sit_elsewhere:
            spares, self._spares = self._spares, []
        else:  # those that are half made may be of other nodes than the next ranks
            unready, self._spares = self._spares, []
            leaving = asyncio.create_task(in_passing_thread(kill_actors, unready))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        self._seats, self._are_ready = seats, False
        return RankGroup(
            config,
            self._placement_group,
            epoch=epoch,
            num_blocks=num_blocks,
            limits=self._limits,
            runner_factory=self._runner_factory,
            seats=seats,
            spares=spares,
        )

    def prepare_spares(self, info: GroupInfo) -> None:
        """In the background: make ready what takes over from the ranks of `info`, should they fail."""
        if self._wants_spares and self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare(info))

    async def stop(self) -> None:
        """End the spares. Idempotent."""
        self._wants_spares = False
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._discard()

    async def _prepare(self, info: GroupInfo) -> None:
        """Until they are taken: make spares, look after them, and make others where one is gone."""
        wait_s = LOOK_AFTER_THEM_EVERY_S
        await asyncio.sleep(SPARES_AFTER_S)
        while True:
            try:
                self._are_ready = self._are_ready or await self._make(info)
            except Exception as error:
                logger.warning("no spare ranks: %s", first_line(error))
            if self._are_ready:
                wait_s = LOOK_AFTER_THEM_EVERY_S
                await asyncio.sleep(LOOK_AFTER_THEM_EVERY_S)
                answers = await asyncio.gather(*(answer_within(spare.status.remote(), 5.0) for spare in self._spares))
                self._are_ready = all(answers)
            if not self._are_ready:
                await self._discard()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _make(self, info: GroupInfo) -> bool:
        world_size = len(info.ranks)
        seats = self._seats if self._seats is not None else range(world_size)
        self._spares = [new_rank(self._placement_group, seat, rank, world_size) for rank, seat in enumerate(seats)]
        shares = [report.identity.share for report in info.ranks]
        getting_ready = [spare.get_ready.remote(share) for spare, share in zip(self._spares, shares, strict=True)]
        return all(await asyncio.gather(*map(result_of, getting_ready)))

    async def _discard(self) -> None:
        spares, self._spares = self._spares, []
        await in_passing_thread(kill_actors, spares)
