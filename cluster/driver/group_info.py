"""The deadlines of a rank group, and the description of a started one."""

from dataclasses import dataclass

from cluster.wire.rank_status import RankIdentity
from llama_core.rank_report import RankReport


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
class GroupInfo:
    """A started group. num_blocks: the cache's size in blocks. max_seq_len: the context that the ranks have room for; None if
    they have no model. Both are the same on every rank. context_limit: the reason for a shorter context than
    configured, where that is not memory. loaded_s: when every rank had its weights, by time.monotonic in the driver."""

    epoch: int
    num_blocks: int
    ranks: tuple[RankReport, ...]
    identities: tuple[RankIdentity, ...] = ()
    max_seq_len: int | None = None
    context_limit: str | None = None
    loaded_s: float = 0.0
