"""A rank's identity and progress."""

from dataclasses import dataclass
from enum import StrEnum

from cluster.wire.process_end import ProcessIdentity


class Phase(StrEnum):
    """The phases of a rank, in this order."""

    STARTED = "started"
    FETCHING = "fetching"
    RENDEZVOUS = "rendezvous"
    LOADING = "loading"
    WARMING_UP = "warming up"
    READY = "ready"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of its node: compute threads, and GPUs by the ids that Ray gives them on that node."""

    num_threads: int
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The process that is this rank, and its place."""

    rank: int
    process: ProcessIdentity
    node_id: str
    node_ip: str
    share: Share


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A rank's progress. `bytes_total` is 0 until fetching or loading has begun.

    step_s: seconds spent in steps so far. waited_s, sampled_s: the parts of step_s in which the rank waited for other ranks or
    for masks of grammars, and in which it sampled; None if the backend does not measure them.
    """

    rank: int
    phase: Phase
    bytes_loaded: int
    bytes_total: int
    pid: int
    node_id: str
    num_steps: int = 0
    step_s: float = 0.0
    waited_s: float | None = None
    sampled_s: float | None = None
