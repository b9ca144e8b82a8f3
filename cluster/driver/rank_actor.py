"""Creates the Ray actor of a rank, in its bundle."""

from collections.abc import Mapping
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.driver.placement import actor_options, rank_bundle_index
from cluster.rank.rank_worker import RankWorker

OPTIONS: Final[dict[str, Any]] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 1}}
RankActor: Any = ray.remote(**OPTIONS)(RankWorker)


def new_rank(
    placement_group: PlacementGroup, seat: int, rank: int, world_size: int, bundle: Mapping[str, float] | None = None
) -> Any:
    """An actor in the bundle of `seat`, that takes all of that `bundle`, or, without one, nothing of what another has."""
    strategy = PlacementGroupSchedulingStrategy(placement_group, rank_bundle_index(seat))
    options = actor_options(bundle or {})
    return RankActor.options(scheduling_strategy=strategy, **options).remote(rank, world_size)
