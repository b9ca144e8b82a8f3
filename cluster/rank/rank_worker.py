"""One model-parallel rank as a Ray actor: joins its group, loads its share of the weights, then answers steps until
the end.

Everything runs in order on the actor's one default thread; a second thread ("control") tells how far it is. It decides
nothing: whatever goes wrong while serving is reported once and ends the process, because a group with a failed
collective is of no more use and a clean shutdown of it can hang. torch is imported when there are weights to load,
not before.
"""

import gc
import importlib
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NoReturn, Protocol

import ray
from tqdm import tqdm

from cluster.rank import cpu_pinning as cores
from cluster.rank.network_interface import interface_of, is_loopback
from cluster.rank.runner_factory import RunnerFactory, Seat, StepExecutor
from cluster.wire.messages import Ack, Answer, Fault, FrameSocket, WireError, decode_step
from cluster.wire.process_end import ProcessIdentity
from cluster.wire.transport import Invitation, connect
from llama_core.checkpoint.digest import CheckpointDigest
from llama_core.config import EngineConfig
from llama_core.host_memory import available_host_bytes
from llama_core.scheduling.step import Pending, StepOutput

logger = logging.getLogger(__name__)

_LINGER_S: Final = 5.0  # a rank whose driver has left ends by itself after so long, should nobody end it
_PROGRESS_INTERVAL_S: Final = 1.0
_STEPS_BEHIND: Final = 1  # that are queued on a device behind the one that computes
_LOOK_EVERY_S: Final = 50e-6  # whether a device's step is ready, while the next one's message may come
SPARE_NEEDS_BYTES: Final = 2 * 2**30  # free memory, of which a spare takes a tenth


class Phase(StrEnum):
    STARTED = "started"
    RENDEZVOUS = "rendezvous"
    LOADING = "loading"
    WARMING_UP = "warming up"
    READY = "ready"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank may use of its node: threads that compute, and GPUs by the numbers under which its node knows them."""

    num_threads: int
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankIdentity:
    rank: int
    process: ProcessIdentity
    node_id: str
    node_ip: str
    share: Share


@dataclass(frozen=True, slots=True)
class RankStatus:
    """How far a rank is; `bytes_total` is 0 until loading has begun.

    step_s: seconds spent in steps so far, waited_s: those of them in which it waited for other ranks, if that is known.
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


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What loading came to. `cores` is empty for a rank that is not pinned; `seconds` covers rendezvous and imports
    too. `files_id` stands for the files that were verified and loaded, `digest` for their contents.
    """

    max_num_blocks: int
    weight_bytes: int
    load_seconds: float
    seconds: float
    device: str
    dtype: str
    files_id: int
    digest: CheckpointDigest | None
    cores: tuple[int, ...]


class _Text(Protocol):
    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class RankWorker:
    """Methods are called in this order: identify, connect, offer_store (rank 0), load, prepare, serve. `status` at
    any time. A spare process is told to `get_ready` first, and identified when it is needed.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._epoch = -1
        self._share: Share | None = None  # of a spare, which has no resources of its own
        self._phase = Phase.STARTED
        self._bytes = (0, 0)
        self._num_steps, self._step_s = 0, 0.0
        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        self._node_ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listen_socket: socket.socket | None = None
        self._driver: FrameSocket | None = None
        self._runner: StepExecutor | None = None
        self._core_claim: cores.CoreClaim | None = None
        log_with_rank(rank, "spare")

    def identify(self, epoch: int) -> RankIdentity:
        """From now on this is the rank of that epoch."""
        self._epoch = epoch
        log_with_rank(self._rank, epoch)
        share = self._own_share()
        return RankIdentity(self._rank, ProcessIdentity.of(os.getpid()), self._node_id, self._node_ip, share)

    def get_ready(self, share: Share) -> bool:
        """Do before it is needed what takes a rank longest: import torch. Quietly: in a thread that yields to all others.

        False, and nothing is done, where the host's memory is short.
        """
        free_bytes = available_host_bytes()
        if free_bytes < SPARE_NEEDS_BYTES:
            logger.warning("no spare: %d MB of memory are free", free_bytes // 10**6)
            return False
        self._share = share
        _limit_threads(share.num_threads)
        if share.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpu_ids)
        thread = threading.Thread(target=_import_quietly)
        thread.start()
        thread.join()
        logger.info("ready to take over")
        return True

    def _own_share(self) -> Share:
        if self._share is None:
            assigned: dict[str, float] = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
            gpu_ids = tuple(str(index) for index in ray.get_gpu_ids())
            self._share = Share(max(1, int(assigned.get("CPU", 1))), gpu_ids)
        return self._share

    def connect(self, invitation: Invitation, timeout_s: float) -> None:
        """Connects to the driver. Raises OSError."""
        self._driver = connect(invitation, self._rank, timeout_s)

    def offer_store(self, host: str) -> int:
        """Listens at `host` for the rendezvous, on a port that the kernel picks and that stays ours; which one."""
        self._listen_socket = socket.create_server((host, 0), backlog=self._world_size + 16)
        port: int = self._listen_socket.getsockname()[1]
        return port

    def load(
        self, config: EngineConfig, store_host: str, store_port: int, timeout_s: float, runner_factory: RunnerFactory
    ) -> RankLoad:
        """Joins the group, loads the weights. Raises what the factory raises (CheckpointError, ConfigError, ...)."""
        began = time.monotonic()
        self._phase = Phase.RENDEZVOUS
        share = self._own_share()
        num_threads = share.num_threads
        if config.device == "cpu" or (config.device == "auto" and not share.gpu_ids):
            self._core_claim = cores.pin_process(num_threads)
        _limit_threads(num_threads)
        self._choose_interface(store_host)
        listen_fd = self._listen_socket.detach() if self._listen_socket is not None else None
        seat = Seat(self._rank, self._world_size, store_host, store_port, listen_fd, num_threads, timeout_s)
        progress = _Progress(self)
        try:
            self._runner = runner_factory(config, seat, progress)
        finally:
            progress.close()
        report = self._runner.report
        loaded = RankLoad(
            max_num_blocks=self._runner.max_num_blocks(),
            weight_bytes=report.weight_bytes,
            load_seconds=report.seconds,
            seconds=time.monotonic() - began,
            device=str(report.device),
            dtype=str(report.dtype),
            files_id=report.files_id,
            digest=report.digest,
            cores=self._core_claim.cores if self._core_claim else (),
        )
        logger.info("loaded bytes=%d seconds=%.2f device=%s", loaded.weight_bytes, loaded.seconds, loaded.device)
        return loaded

    def prepare(self, num_blocks: int) -> None:
        """Allocates the cache and runs once what a step runs, so that the first request does not pay for it."""
        assert self._runner is not None
        self._phase = Phase.WARMING_UP
        self._runner.allocate_cache(num_blocks)
        self._runner.warm_up()
        # What is alive now lives as long as the process: spare every later collection from walking torch's objects.
        gc.collect()
        gc.freeze()
        self._phase = Phase.READY

    def serve(self) -> None:
        """Answers steps until the driver closes the connection. On an error the process ends after reporting it."""
        assert self._driver is not None
        assert self._runner is not None
        self._phase = Phase.SERVING
        logger.info("serving")
        try:
            self._serve(self._driver, self._runner)
        except BaseException as error:
            self._report_and_exit(self._driver, error)
        self._phase = Phase.ENDED
        logger.info("driver left")
        lingering = threading.Timer(_LINGER_S, os._exit, (0,))
        lingering.daemon = True
        lingering.start()

    @ray.method(concurrency_group="control")
    def status(self) -> RankStatus:
        loaded, total = self._bytes
        waited_s = self._runner.seconds_waited() if self._runner is not None else None
        return RankStatus(
            rank=self._rank,
            phase=self._phase,
            bytes_loaded=loaded,
            bytes_total=total,
            pid=os.getpid(),
            node_id=self._node_id,
            num_steps=self._num_steps,
            step_s=self._step_s,
            waited_s=waited_s,
        )

    def note_progress(self, loaded: int, total: int) -> None:
        self._phase = Phase.LOADING
        self._bytes = (loaded, total)

    @property
    def rank(self) -> int:
        return self._rank

    def _serve(self, driver: FrameSocket, runner: StepExecutor) -> None:
        """Answers steps in their order, each as soon as it is ready. A step that comes while another computes by itself, on a
        GPU, is started behind it."""
        under_way: deque[Pending[StepOutput]] = deque()
        while True:
            while under_way and (len(under_way) > _STEPS_BEHIND or under_way[0].is_ready()):
                self._answer(driver, under_way.popleft().result())
            if under_way and not driver.is_waiting(_LOOK_EVERY_S):
                continue
            payload = driver.receive()
            if payload is None:
                return
            batch = decode_step(payload)
            if batch.epoch != self._epoch:
                raise WireError(f"got a step of epoch {batch.epoch} in epoch {self._epoch}")
            began = time.perf_counter()
            under_way.append(runner.start(batch))
            self._step_s += time.perf_counter() - began if under_way[-1].is_done else 0.0

    def _answer(self, driver: FrameSocket, output: StepOutput) -> None:
        self._num_steps += 1
        if self._rank == 0:
            driver.send(Answer(output))
        else:
            driver.send(Ack(output.epoch, output.step, self._rank))

    def _report_and_exit(self, driver: FrameSocket, error: BaseException) -> NoReturn:
        try:
            if isinstance(error, ConnectionError):
                logger.info("driver left: %s", error)
            else:
                logger.error("failed, ending", exc_info=error)
                text = str(error)[:2000]
                driver.send(Fault(self._epoch, self._rank, type(error).__name__, text, is_collective(error)))
        except (OSError, WireError):
            logger.info("driver left before it could be told")
        finally:
            for handler in logging.getLogger().handlers:
                handler.flush()
            os._exit(1)

    def _choose_interface(self, store_host: str) -> None:
        """Keeps gloo and NCCL off every interface but the one the ranks share. What an operator has set stays."""
        own = store_host if is_loopback(store_host) else self._node_ip
        name = interface_of(own)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def is_collective(error: BaseException) -> bool:
    """Whether `error` came out of an operation between ranks, so that another rank's end may be its cause."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection closed by peer")
    )


def _limit_threads(num_threads: int) -> None:
    """Before torch and numpy are imported, who read this then."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if platform.machine() == "x86_64":  # elsewhere torch multiplies with it too
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own: no product of matrices is its work here


def _import_quietly() -> None:
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of a thread, where the system is Linux
    importlib.import_module("llama_core.execution.runner")


def log_with_rank(rank: int, epoch: int | str) -> None:
    """Sends this project's log lines to stderr, which Ray files for each worker and shows the driver, with the rank
    in them.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s rank={rank} epoch={epoch} %(name)s %(message)s"))
    for name in ("cluster", "llama_core"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(logging.INFO)
        log.propagate = False


class _Progress:
    """Called with bytes loaded and bytes in all: keeps the status current and draws a progress bar on stderr."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, loaded: int, total: int) -> None:
        self._worker.note_progress(loaded, total)
        if self._bar is None:
            tqdm.monitor_interval = 0  # no thread that would outlive the bar
            self._bar = tqdm(
                desc=f"rank {self._worker.rank} weights",
                total=total,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                mininterval=_PROGRESS_INTERVAL_S,
                ncols=90,
                ascii=" =",
                file=_LinePerRefresh(sys.stderr),
            )
        self._bar.update(loaded - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _LinePerRefresh:
    """Ray forwards whole lines only, so each refresh of a bar becomes one instead of a carriage return."""

    def __init__(self, stream: _Text) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()
