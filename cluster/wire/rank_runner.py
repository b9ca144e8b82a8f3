"""The interface between a rank and its runner, and the factory that makes a runner in the rank's process."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llama_core.config import EngineConfig
from llama_core.rank_report import RankReport
from llama_core.scheduling.step import Pending, StepInput, StepOutput


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What all ranks of a group are told when they load. `rank_0_host`: loopback if all ranks are on one host. `store_path`: on
    the driver's node, the file in a private directory through which the ranks find each other; elsewhere "", and they use
    `RendezvousSpec.call_store`. `former_blocks`: cache blocks of the group that this one replaces, 0 for a first group.
    """

    config: EngineConfig
    runner_factory: "RunnerFactory"
    rank_0_host: str
    store_path: str
    timeout_s: float
    former_blocks: int


class Keys:
    """The keys and values by which torch's ranks find each other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set."""
        return all(key in self._values for key in keys)


@dataclass(frozen=True, slots=True)
class RendezvousSpec:
    """The information by which a rank joins its group. `call_store`: calls a method of rank 0's `Keys`; None where the ranks
    meet in a file. `device_index`: of the rank's own GPU among those that its process sees.
    """

    rank: int
    world_size: int
    order: LoadOrder
    call_store: Callable[..., Any] | None
    num_threads: int
    device_index: int


class RankRunner(Protocol):
    """The part of `llama_core.backends.runner.ModelRunner` that a rank uses."""

    @property
    def report(self) -> RankReport: ...
    def max_num_blocks(self) -> int: ...
    def seconds_waited(self) -> float | None: ...
    def seconds_sampled(self) -> float | None: ...
    def allocate_cache(self, num_blocks: int) -> None: ...
    def warm_up(self) -> None: ...
    def start(self, batch: StepInput) -> Pending[StepOutput]: ...


# Called in the rank with (bytes loaded, bytes in all) as a callback. A Ray call carries the factory, so it must be picklable.
RunnerFactory = Callable[[EngineConfig, RendezvousSpec, Callable[[int, int], None]], RankRunner]


@dataclass(frozen=True, slots=True)
class NamedRunnerFactory:
    """A runner factory by its import path ("module:function"), imported in the rank and nowhere else."""

    import_path: str

    def __call__(
        self, config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
    ) -> RankRunner:
        factory: RunnerFactory = pkgutil.resolve_name(self.import_path)
        return factory(config, rendezvous, on_progress)


MODEL_RUNNER_FACTORY: Final = NamedRunnerFactory("cluster.rank.runner_factory:load_model_runner")
