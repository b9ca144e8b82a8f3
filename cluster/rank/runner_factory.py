"""What a rank runs: the factory it is given, or the default one, which joins torch's group and loads the model."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from llama_core.checkpoint.digest import CheckpointDigest
from llama_core.config import EngineConfig
from llama_core.scheduling.step import Pending, StepInput, StepOutput

if TYPE_CHECKING:
    from llama_core.execution.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its group. Rank 0 has `listen_fd`: a socket that listens at `store_host`:`store_port`
    already, and with it the key-value store through which the ranks find each other.
    """

    rank: int
    world_size: int
    store_host: str
    store_port: int
    listen_fd: int | None
    num_threads: int
    timeout_s: float


class LoadFacts(Protocol):
    """The part of `llama_core.execution.runner.LoadReport` that is told to the driver."""

    @property
    def seconds(self) -> float: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def device(self) -> object: ...
    @property
    def dtype(self) -> object: ...
    @property
    def files_id(self) -> int: ...
    @property
    def digest(self) -> CheckpointDigest | None: ...


class StepExecutor(Protocol):
    """What a rank needs of `llama_core.execution.runner.ModelRunner`."""

    @property
    def report(self) -> LoadFacts: ...
    def max_num_blocks(self) -> int: ...
    def seconds_waited(self) -> float | None: ...
    def allocate_cache(self, num_blocks: int) -> None: ...
    def warm_up(self) -> None: ...
    def start(self, batch: StepInput) -> Pending[StepOutput]: ...


# Called in the rank with (bytes loaded, bytes in all) for a callback. It travels by a Ray call: any picklable callable.
RunnerFactory = Callable[[EngineConfig, Seat, Callable[[int, int], None]], StepExecutor]


def load_model_runner(config: EngineConfig, seat: Seat, on_progress: Callable[[int, int], None]) -> StepExecutor:
    """Joins torch's group if there are others, loads this rank's share. Raises CheckpointError, ConfigError, RuntimeError."""
    import torch

    from llama_core.execution.parallel import alone
    from llama_core.execution.runner import ModelRunner

    # In this thread, which runs the steps. Where OMP_NUM_THREADS has said so already, saying it again costs a thread pool.
    if torch.get_num_threads() != seat.num_threads:
        torch.set_num_threads(seat.num_threads)
    if seat.world_size > 1:
        parallel = _join(config, seat)
    else:
        parallel = alone(config.device)
        if seat.listen_fd is not None:
            os.close(seat.listen_fd)  # nobody will come
    return ModelRunner.load(config, parallel, on_progress)


def _join(config: EngineConfig, seat: Seat) -> "Parallel":
    import torch.distributed as dist

    from llama_core.execution.parallel import join

    store = dist.TCPStore(  # type: ignore[attr-defined]
        seat.store_host,
        seat.store_port,
        seat.world_size,
        is_master=seat.listen_fd is not None,
        timeout=timedelta(seconds=seat.timeout_s),
        wait_for_workers=False,
        master_listen_fd=seat.listen_fd,
    )
    return join(seat.rank, seat.world_size, config.device, store, seat.timeout_s)
