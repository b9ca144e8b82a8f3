"""The deadlines of a rank group, and the description of a started one."""

from dataclasses import dataclass

from cluster.wire.rank_status import RankIdentity, RankLoad


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Deadlines in seconds. A step's deadline runs from when it becomes the oldest unanswered one; on GPUs a first step may
    compile. It is `step_timeout_s` at most, and less once the fan-out has learned how long steps take (`fan_out.py`).
    """

    start_timeout_s: float = 600.0
    step_timeout_s: float = 60.0
    stop_timeout_s: float = 5.0
    kill_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank of a started group."""

    identity: RankIdentity
    load: RankLoad


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A started group. `num_blocks` is the cache's size in blocks, the same on every rank."""

    epoch: int
    num_blocks: int
    ranks: tuple[RankReport, ...]
