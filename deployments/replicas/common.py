"""What the replicas with ranks, and those with many streams, need of their process."""

import gc

import ray

from cluster.driver.group_info import GroupLimits
from cluster.driver.standby import StandbyPool
from cluster.wire.rank_runner import MODEL_RUNNER_FACTORY, NamedRunnerFactory
from deployments.args import EngineArgs


def collect_garbage_rarely() -> None:
    """Exempt the objects that live as long as the replica from garbage collection: one full collection would delay every
    stream by 0.15 s. Requests leave few cycles, so collections can be rare."""
    gc.freeze()
    gc.set_threshold(10_000)


def pool_for(args: EngineArgs) -> StandbyPool:
    limits = GroupLimits(start_timeout_s=args.start_timeout_s, step_timeout_s=args.step_timeout_s)
    placement_group = ray.util.get_current_placement_group()
    assert placement_group is not None, "build_app gives every replica a placement group"
    factory = NamedRunnerFactory(args.runner_factory) if args.runner_factory else MODEL_RUNNER_FACTORY
    return StandbyPool(
        placement_group, limits, enabled=args.spare_ranks, runner_factory=factory, downloads=args.downloads
    )
