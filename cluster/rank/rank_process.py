"""One model-parallel rank, in its own process: joins its group, loads its share of the weights, then executes steps.

It decides nothing. Any error while it serves is reported once and ends the process, because a group cannot be used after a
failed collective, and its orderly shutdown can hang. torch is imported only when weights are loaded. Knows nothing of Ray:
`cluster.wire.rank_worker` passes in what Ray reports.
"""

import gc
import importlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

from tqdm import tqdm

from cluster.rank import cpu_pinning
from cluster.rank.network_interface import interface_of, is_loopback
from cluster.rank.step_executor import StepExecutor
from cluster.wire.messages import FrameSocket, WireError
from cluster.wire.process_end import ProcessIdentity
from cluster.wire.rank_runner import LoadOrder, RankRunner, RendezvousSpec
from cluster.wire.rank_status import Phase, RankIdentity, RankStatus, Share
from cluster.wire.transport import Invitation, connect
from llama_core.errors import CheckpointError
from llama_core.files.digest import CheckpointDigest
from llama_core.host.memory import available_host_bytes
from llama_core.log_lines import LOG_FORMAT_VARIABLE, JsonFormatter
from llama_core.rank_report import RankReport
from llama_core.remote import store
from llama_core.remote.model_files import Kind, RemoteModel

logger = logging.getLogger(__name__)

_VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
_LINGER_S: Final = 5.0  # after the driver has left, a rank ends by itself after this time
STANDBY_NEEDS_BYTES: Final = 2 * 2**30  # free memory on the host; a standby process takes a tenth of it


class RankProcess:
    """Implements `cluster.wire.rank_worker.RankControl`."""

    def __init__(self, rank: int, world_size: int, node_id: str, node_ip: str) -> None:
        self._rank = rank
        self._world_size = world_size
        self._node_id = node_id
        self._node_ip = node_ip
        self._epoch = -1
        self._share: Share | None = None
        self._phase = Phase.STARTED
        self._bytes = (0, 0)
        self._downloads: Sequence[RemoteModel] = ()
        self._driver: FrameSocket | None = None
        self._runner: RankRunner | None = None
        self._executor: StepExecutor | None = None
        self._core_claim: cpu_pinning.CoreClaim | None = None
        log_with_rank(rank, "standby")

    def preload(self, share: Share) -> bool:
        """Import torch, the longest part of a rank's start, and for a GPU the kernels, in a thread of the lowest priority.
        `share` is that of the rank that this process may replace. Returns False and does nothing where the host is short of
        memory.
        """
        free_bytes = available_host_bytes()
        if free_bytes < STANDBY_NEEDS_BYTES:
            logger.warning("no standby process: only %d MB of host memory are free", free_bytes // 10**6)
            return False
        self._share = share
        _limit_threads(share.num_threads)
        if share.gpu_ids:
            os.environ[_VISIBLE_GPUS] = ",".join(share.gpu_ids)
        thread = threading.Thread(target=_import_at_low_priority, args=(bool(share.gpu_ids),))
        thread.start()
        thread.join()
        logger.info("standby process ready")
        return True

    def identify(self, epoch: int, share: Share) -> RankIdentity:
        """Become the rank of that epoch. A standby process keeps the share that it was given by `preload`."""
        self._epoch = epoch
        log_with_rank(self._rank, epoch)
        self._share = self._share or share
        process = ProcessIdentity.of(os.getpid())
        return RankIdentity(self._rank, process, self._node_id, self._node_ip, self._share)

    def fetch(self, downloads: Sequence[RemoteModel]) -> None:
        """Raises FetchError."""
        self._phase, self._downloads = Phase.FETCHING, downloads
        for model in downloads:
            bar = LoadProgressBar(f"rank {self._rank} fetches {model.name}", self._write_line())
            try:
                store.fetch(model, partial(self._on_progress, bar))
            finally:
                bar.close()
        self._bytes = (0, 0)

    def connect(self, invitation: Invitation, timeout_s: float) -> None:
        """Connect to the driver. Raises OSError."""
        self._driver = connect(invitation, self._rank, timeout_s)

    def load(
        self, order: LoadOrder, visible_gpus: Sequence[str] = (), call_store: Callable[..., Any] | None = None
    ) -> RankReport:
        """Join the group and load the weights. Raises what the factory raises (CheckpointError, ConfigError, ...)."""
        assert self._share is not None
        began = time.monotonic()
        self._phase = Phase.RENDEZVOUS
        num_threads = self._share.num_threads
        if order.config.device == "cpu" or (order.config.device == "auto" and not self._share.gpu_ids):
            self._core_claim = cpu_pinning.pin_process(num_threads)
        _limit_threads(num_threads)
        device_index = _show_gpus(visible_gpus, self._share.gpu_ids)
        self._choose_interface(order.rank_0_host)
        rendezvous = RendezvousSpec(self._rank, self._world_size, order, call_store, num_threads, device_index)
        bar = LoadProgressBar(f"rank {self._rank} weights", self._write_line())

        def on_progress(loaded: int, total: int) -> None:
            self._phase = Phase.LOADING
            self._on_progress(bar, loaded, total)

        ckpt_dir, tokenizer_path = order.config.ckpt_dir, order.config.tokenizer_path
        kind: Kind = "model" if tokenizer_path == ckpt_dir else "tokenizer"
        paths = {"ckpt_dir": store.local(ckpt_dir), "tokenizer_path": store.local(tokenizer_path, kind)}
        config = replace(order.config, **paths)  # type: ignore[arg-type]
        try:
            self._runner = order.runner_factory(config, rendezvous, on_progress)
        except CheckpointError:
            self._check_downloads(None)  # a damaged download is the likeliest cause
            raise
        finally:
            bar.close()
        self._check_downloads(self._runner.report.digest)
        max_num_blocks = self._runner.max_num_blocks()
        report = replace(
            self._runner.report,  # now final: max_num_blocks may lower the context
            rank=self._rank,
            start_seconds=time.monotonic() - began,
            cores=self._core_claim.cores if self._core_claim else (),
            max_num_blocks=max_num_blocks,
        )
        logger.info("loaded bytes=%d seconds=%.2f device=%s", report.weight_bytes, report.start_seconds, report.device)
        return report

    def prepare(self, num_blocks: int) -> None:
        """Allocate the cache and run a warm-up step, so that the first request does not wait for it."""
        assert self._runner is not None
        self._phase = Phase.WARMING_UP
        self._runner.allocate_cache(num_blocks)
        self._runner.warm_up()
        # Objects alive now live as long as the process, so the garbage collector need not walk torch's objects again.
        gc.collect()
        gc.freeze()
        self._phase = Phase.READY

    def serve(self) -> None:
        """Execute steps until the driver closes the connection. On an error the process reports it and exits."""
        assert self._driver is not None
        assert self._runner is not None
        self._executor = StepExecutor(self._rank, self._epoch, self._driver, self._runner)
        self._phase = Phase.SERVING
        logger.info("serving")
        try:
            self._executor.run()
        except BaseException as error:
            _report_and_exit(self._executor, error)
        self._phase = Phase.ENDED
        logger.info("the driver closed the connection")
        lingering = threading.Timer(_LINGER_S, os._exit, (0,))
        lingering.daemon = True
        lingering.start()

    def status(self) -> RankStatus:
        loaded, total = self._bytes
        executor = self._executor
        return RankStatus(
            rank=self._rank,
            phase=self._phase,
            bytes_loaded=loaded,
            bytes_total=total,
            pid=os.getpid(),
            node_id=self._node_id,
            num_steps=executor.num_steps if executor is not None else 0,
            step_s=executor.step_s if executor is not None else 0.0,
            waited_s=self._runner.seconds_waited() if self._runner is not None else None,
            sampled_s=self._runner.seconds_sampled() if self._runner is not None else None,
        )

    def _on_progress(self, bar: "LoadProgressBar", done: int, total: int) -> None:
        self._bytes = (done, total)
        bar.update(done, total)

    def _write_line(self) -> Callable[[str], object] | None:
        return partial(logger.info, "%s") if _logs_json() else None

    def _check_downloads(self, digest: CheckpointDigest | None) -> None:
        """Raises DamagedDownload. digest: of the files that have been loaded, so that no weight is read twice."""
        for model in self._downloads:
            store.check_downloads(model, dict(digest.files) if digest is not None else None)

    def _choose_interface(self, rank_0_host: str) -> None:
        """Keep gloo and NCCL off every interface but the one that the ranks share, unless the operator has chosen one."""
        own = rank_0_host if is_loopback(rank_0_host) else self._node_ip
        name = interface_of(own)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _report_and_exit(executor: StepExecutor, error: BaseException) -> NoReturn:
    try:
        if isinstance(error, ConnectionError):
            logger.info("lost the connection to the driver: %s", error)
        else:
            logger.error("a step failed, the process ends", exc_info=error)
            executor.report(error)
    except (OSError, WireError):
        logger.info("the driver left before the error could be reported")
    finally:
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(1)


def _show_gpus(visible: Sequence[str], own: Sequence[str]) -> int:
    """Let this process see these GPUs, and return the index of its own among them. CUDA reads the variable at its first call,
    which loading makes; a standby process has not made it either."""
    if not own or own[0] not in visible:
        return 0
    os.environ[_VISIBLE_GPUS] = ",".join(visible)
    return list(visible).index(own[0])


def _limit_threads(num_threads: int) -> None:
    """To be called before torch and numpy are imported, which read these variables once."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    if platform.machine() == "x86_64":  # on other machines torch multiplies matrices with OpenBLAS too
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own; a rank does no matrix product in numpy


def _import_at_low_priority(has_gpus: bool) -> None:
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Linux has a priority for each thread
    importlib.import_module("llama_core.backends.runner")
    if has_gpus:
        importlib.import_module("llama_core.backends.fused.device").import_kernels()
    # The collection in `prepare` then walks no object of torch, for which it takes 0.1 s.
    gc.collect()
    gc.freeze()


def _logs_json() -> bool:
    return os.environ.get(LOG_FORMAT_VARIABLE) == "json"


def log_with_rank(rank: int, epoch: int | str) -> None:
    """Send this project's log lines, with the rank in them, to stderr: Ray files it for each worker and shows the driver."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s rank={rank} epoch={epoch} %(name)s %(message)s")
    handler.setFormatter(JsonFormatter({"rank": rank, "epoch": epoch}) if _logs_json() else text)
    for name in ("cluster", "llama_core"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(logging.INFO)
        log.propagate = False


_INTERVAL_S: Final = 1.0


class LoadProgressBar:
    """Draws `title` and a bar on stderr, or hands each line to `write_line`; `update` takes bytes done and bytes in all."""

    def __init__(self, title: str, write_line: Callable[[str], object] | None = None) -> None:
        self._title = title
        self._write_line = write_line or (lambda line: print(line, file=sys.stderr, flush=True))
        self._bar: tqdm[NoReturn] | None = None

    def update(self, loaded: int, total: int) -> None:
        if self._bar is None:
            tqdm.monitor_interval = 0  # no thread that would outlive the bar
            self._bar = tqdm(
                desc=self._title,
                total=total,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                mininterval=_INTERVAL_S,
                ncols=90,
                ascii=" =",
                file=self,
            )
        self._bar.update(loaded - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def write(self, text: str) -> None:
        """What the bar writes. Each refresh becomes a line of its own: Ray forwards whole lines only, no carriage returns."""
        if line := text.strip("\r\n "):
            self._write_line(line)

    def flush(self) -> None:
        pass
