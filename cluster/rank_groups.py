"""The groups of ranks that one replica has one after the other, and the spare processes from which the next is made.

What takes a new process longest is importing torch: 2.4 of 3.5 s. A spare has done that beforehand, beside each rank, in
the rank's own bundle, where it takes memory and no time. Ray ends it with the replica that owns it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup

from cluster.rank_actor import new_rank
from cluster.rank_group import GroupInfo, GroupLimits, RankGroup
from cluster.ray_calls import first_line, in_passing_thread, result_of
from cluster.runner_factory import RunnerFactory, load_model_runner
from llama_core.config import EngineConfig

logger = logging.getLogger(__name__)

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

    @property
    def num_spares(self) -> int:
        """That could take over now."""
        return len(self._spares) if self._are_ready else 0

    def open(self, config: EngineConfig, epoch: int, num_blocks: int | None) -> RankGroup:
        """A group that has not started, made of the spares if they are ready."""
        spares, self._spares = (self._spares, []) if self._are_ready else ([], self._spares)
        self._are_ready = False
        return RankGroup(
            config,
            self._placement_group,
            epoch=epoch,
            num_blocks=num_blocks,
            limits=self._limits,
            runner_factory=self._runner_factory,
            spares=spares,
        )

    def prepare_spares(self, info: GroupInfo) -> None:
        """In the background: make ready what takes over from the ranks of `info`, should they fail."""
        if self._wants_spares and (self._preparing is None or self._preparing.done()) and not self._spares:
            self._preparing = asyncio.create_task(self._prepare(info))

    async def stop(self) -> None:
        """End the spares. Idempotent."""
        self._wants_spares = False
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        await in_passing_thread(self._kill, self._spares)
        self._spares = []

    async def _prepare(self, info: GroupInfo) -> None:
        await asyncio.sleep(SPARES_AFTER_S)
        try:
            self._spares = [new_rank(self._placement_group, rank, len(info.ranks)) for rank in range(len(info.ranks))]
            shares = [report.identity.share for report in info.ranks]
            getting_ready = [spare.get_ready.remote(share) for spare, share in zip(self._spares, shares, strict=True)]
            self._are_ready = all(await asyncio.gather(*map(result_of, getting_ready)))
        except ray.exceptions.RayError as error:
            logger.warning("no spare ranks: %s", first_line(error))
        if not self._are_ready:
            await in_passing_thread(self._kill, self._spares)
            self._spares = []

    def _kill(self, actors: Sequence[Any]) -> None:
        for actor in actors:
            ray.kill(actor, no_restart=True)
