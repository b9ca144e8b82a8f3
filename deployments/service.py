"""One replica's engine from start to end: rank group, scheduler and engine loop brought up, kept up, and taken down.

When the ranks fail, other ranks take their place and go on with every live request from its tokens: its reader sees a pause.

Implements `deployments.engine.Engine` for the HTTP layer. Knows nothing of HTTP and nothing of Serve.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.rank_group import GroupInfo
from cluster.rank_worker import RankStatus
from deployments.args import ServerArgs
from deployments.engine import Readiness
from deployments.engine_loop import EngineLoop, Runner, StepStats
from deployments.token_stream import TokenStream
from llama_core.blocks import BlockPool
from llama_core.config import EngineConfig, read_params
from llama_core.errors import CheckpointError, EngineError, LlamaError, NotReady, RankFailure, TokenizerError
from llama_core.request import SamplingParams, mix_seed
from llama_core.scheduler import Scheduler, SchedulerConfig
from llama_core.shards import find_shards
from llama_core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LOADING_PERIOD_S = 1.0
RETRY_AFTER_S = 0.5  # between attempts to bring the ranks back; longer each time
MAX_FRUITLESS = 12  # failures in turn without a step between them that no request is found to be to blame for
MAX_GIVEN_UP = 8  # requests in turn, likewise, that were: so many can hardly be
CALM_S = 60.0  # a failure after so long has nothing to do with the last one


class Group(Runner, Protocol):
    """What the service needs of a rank group; `cluster.rank_group.RankGroup` is one, tests have another."""

    async def start(self) -> GroupInfo: ...
    async def statuses(self) -> Sequence[RankStatus | None]: ...
    async def wait_failed(self) -> RankFailure: ...
    async def stop(self) -> None: ...


class Groups(Protocol):
    """Where the service has its groups from, one after the other; `cluster.rank_groups.RankGroups` is one."""

    def open(self, config: EngineConfig, epoch: int, num_blocks: int | None) -> Group:
        """One that has not started, with as many cache blocks, or None for as many as there is room for."""

    def prepare_spares(self, info: GroupInfo) -> None: ...
    async def stop(self) -> None: ...


class LlamaService:
    """`check` what can be known without ranks, `start`, serve, `stop`. `open_groups` is called once, by then."""

    def __init__(
        self,
        args: ServerArgs,
        open_groups: Callable[[], Groups],
        on_step: Callable[[StepStats], None] = lambda stats: None,
        on_failure: Callable[[LlamaError], None] = lambda error: None,
    ) -> None:
        """Raises TokenizerError, ConfigError or CheckpointError: whatever the files themselves can tell."""
        self.args = args
        if (manifest := args.manifest()) is not None:
            manifest.check_complete(args.checkpoint)  # the ranks read the shards, each on its node
            manifest.verify([args.tokenizer, args.checkpoint / "params.json"])
        self.tokenizer = Tokenizer(args.tokenizer)
        self.num_ranks = args.num_ranks()
        read_params(args.checkpoint, vocab_size=self.tokenizer.n_words).check_world_size(self.num_ranks)
        find_shards(args.checkpoint)
        self.config = args.engine_config(self.tokenizer.n_words, manifest)
        self.info: GroupInfo | None = None
        self.epoch = 0  # of the group that serves, or is to serve
        self._open_groups = open_groups
        self._groups: Groups | None = None
        self._on_step = on_step
        self._on_failure = on_failure
        self._group: Group | None = None
        self._loop: EngineLoop | None = None
        self._failure: LlamaError | None = None
        self._draining = False
        self._recovering: RankFailure | None = None  # what it recovers from
        self._serving: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()
        self._num_seeds = 0
        self._num_steps = 0  # that had been done when the ranks last failed
        self._num_fruitless = 0  # failures since a step was done, or a request was found to be to blame
        self._num_given_up = 0  # requests that were, since a step was done
        self._recovered_s = 0.0
        self._loading = "the ranks are being placed"

    # What a replica goes through.

    async def start(self) -> None:
        """Bring the ranks up and begin to serve. Raises what kept them from it."""
        try:
            self._groups = self._open_groups()
            self._group = self._groups.open(self.config, self.epoch, None)
            self.info = await self._start_group(self._group)
            self._begin(self.info, self._groups, self._group)
        except Exception as error:
            log.exception("the start has failed")
            self._failure = error if isinstance(error, LlamaError) else EngineError(f"{type(error).__name__}: {error}")
            self._on_failure(self._failure)
            raise

    def _begin(self, info: GroupInfo, groups: Groups, group: Group) -> None:
        scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=self.config.max_batch_size,
                max_step_tokens=self.config.max_step_tokens,
                eos_id=self.tokenizer.eos_id,
                max_waiting=self.args.max_queue,
                max_waiting_tokens=self.args.max_queue_tokens,
                max_drafts=self.config.max_drafts,
                prefix_caching=self.config.prefix_caching,
            ),
            BlockPool(info.num_blocks, self.config.block_size),
        )
        self._loop = EngineLoop(scheduler, self.tokenizer, max_seq_len=self.config.max_seq_len, on_step=self._on_step)
        self._serving = asyncio.create_task(self._serve(self._loop, groups, group))
        groups.prepare_spares(info)
        log.info(
            "ready after %.1f s: world size %d, max_seq_len %d, max_batch_size %d, vocabulary %d, %d cache blocks of %d",
            time.monotonic() - self._started_s,
            self.num_ranks,
            self.config.max_seq_len,
            self.config.max_batch_size,
            self.tokenizer.n_words,
            info.num_blocks,
            self.config.block_size,
        )

    async def drain(self) -> None:
        """Take no new request, and wait for the live ones as long as `drain_timeout_s` allows."""
        self._draining = True
        if self._loop is not None and not await self._loop.drain(self.args.drain_timeout_s):
            log.warning("live requests did not end within %.0f s and are cut off", self.args.drain_timeout_s)

    async def stop(self) -> None:
        """End whatever is left. No process of the group remains when this returns."""
        self._draining = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._loop is not None:
            self._loop.fail(NotReady("the server has shut down"))
        if self._groups is not None:
            await self._groups.stop()
        if self._group is not None:
            await self._group.stop()

    # What the HTTP layer and the handle ask.

    @property
    def model_id(self) -> str:
        return self.args.model_id

    @property
    def max_seq_len(self) -> int:
        return self.args.max_seq_len

    def readiness(self) -> Readiness:
        if self._failure is not None:
            return Readiness(False, "failed", self._failure.message, retry_after_s=10.0)
        if self._draining:
            return Readiness(False, "draining", "shutting down", retry_after_s=5.0)
        if self._loop is None:
            return Readiness(False, "loading", self._loading, retry_after_s=2.0)
        if self._recovering is not None:
            detail = f"{self._recovering.message}; new ranks: {self._loading}"
            return Readiness(False, "recovering", detail, retry_after_s=2.0)
        return Readiness(True, "ready")

    def live(self) -> bool:
        """False once only a new replica can help: the ranks cannot be brought back, or work waits and no step completes."""
        if self._failure is not None:
            return False
        # The group's own step deadline comes first; this catches whatever it does not see. Recovery has limits of its own.
        return (
            self._loop is None
            or self._recovering is not None
            or self._loop.stalled_s() < self.args.step_timeout_s + 10.0
        )

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        owner: str = "",
        priority: int = 0,
    ) -> TokenStream:
        """Queue a prompt. Raises NotReady, QueueFull, RankFailure, InvalidParameter or ContextLengthExceeded."""
        if self._failure is not None:
            raise self._failure if isinstance(self._failure, EngineError) else NotReady(self._failure.message)
        readiness = self.readiness()
        if self._loop is None or not readiness.takes_requests:
            raise NotReady(
                f"the server is {readiness.phase}: {readiness.detail}", retry_after_s=readiness.retry_after_s
            )
        return self._loop.submit(prompt, params, stop=stop, owner=owner, priority=priority)

    def next_seed(self) -> int:
        """A seed for a request that names none, derived from the server's and the request's number."""
        self._num_seeds += 1
        return mix_seed(self.args.seed, self._num_seeds)

    def describe(self) -> dict[str, object]:
        scheduler = self._loop.scheduler if self._loop is not None else None
        ranks = self.info.ranks if self.info is not None else ()
        return {
            "model": self.model_id,
            "phase": self.readiness().phase,
            "world_size": self.num_ranks,
            "epoch": self.epoch,
            "ranks": [
                {
                    "rank": report.identity.rank,
                    "node": report.identity.node_ip,
                    "pid": report.identity.process.pid,
                    "device": report.load.device,
                    "dtype": report.load.dtype,
                    "weight_bytes": report.load.weight_bytes,
                    "load_seconds": round(report.load.seconds, 3),
                }
                for report in ranks
            ],
            "max_seq_len": self.config.max_seq_len,
            "max_batch_size": self.config.max_batch_size,
            "max_step_tokens": self.config.max_step_tokens,
            "max_queue": self.args.max_queue,
            "max_queue_tokens": self.args.max_queue_tokens,
            "block_size": self.config.block_size,
            "blocks_total": scheduler.pool.num_blocks if scheduler else 0,
            "blocks_used": scheduler.pool.num_used if scheduler else 0,
            "requests_running": scheduler.num_running if scheduler else 0,
            "requests_waiting": scheduler.num_waiting if scheduler else 0,
            "preemptions": scheduler.num_preemptions if scheduler else 0,
            "prefix_cache_hit_tokens": scheduler.num_prefix_hits if scheduler else 0,
            "draft_tokens": scheduler.num_drafts if scheduler else 0,
            "draft_tokens_accepted": scheduler.num_drafts_accepted if scheduler else 0,
        }

    async def _follow_loading(self, group: Group) -> None:
        """Keep a sentence on how far each rank is, for whoever asks /ready."""
        while True:
            await asyncio.sleep(LOADING_PERIOD_S)
            statuses = await group.statuses()
            words = [f"rank {rank} {_progress(status)}" for rank, status in enumerate(statuses)]
            self._loading = ", ".join(words) or self._loading

    # Serving, and going on after a failure of the ranks.

    async def _serve(self, loop: EngineLoop, groups: Groups, group: Group) -> None:
        try:
            while True:
                failure = await _run_until_failure(loop, group)
                group = await self._recover(loop, groups, group, failure)
        except LlamaError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("the engine loop failed")
            self._give_up(EngineError(f"the engine loop failed: {type(error).__name__}"))

    async def _recover(self, loop: EngineLoop, groups: Groups, group: Group, failure: RankFailure) -> Group:
        """Other ranks in the place of those that failed, and every live request ready to go on. Raises what keeps them away."""
        began = time.monotonic()
        self._on_failure(failure)
        log.error("recovering %d live requests: %s", loop.num_live, failure.message)
        self._recovering, self._loading = failure, "being placed"
        await group.stop()
        self._check_patience(loop, failure, began)
        for attempt in itertools.count(1):
            self.epoch += 1
            if loop.restart(self.epoch, failure):
                self._num_fruitless, self._num_given_up = 0, self._num_given_up + 1
            self._group = group = groups.open(self.config, self.epoch, loop.scheduler.pool.num_blocks)
            left_s = began + self.args.recovery_timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    self.info = info = await self._start_group(group)
                break
            except (CheckpointError, TokenizerError):
                raise  # the same files say the same again
            except Exception as error:
                await group.stop()
                if isinstance(error, TimeoutError):
                    error = RankFailure(f"the time is over: {self._loading}")
                failure = error if isinstance(error, RankFailure) else RankFailure(f"{type(error).__name__}: {error}")
                log.warning("attempt %d to bring the ranks back failed: %s", attempt, failure.message)
            left_s = began + self.args.recovery_timeout_s - time.monotonic()
            if left_s <= 0:
                text = f"the ranks could not be brought back in {self.args.recovery_timeout_s:g} s: {failure.message}"
                raise RankFailure(text, rank=failure.rank)
            await asyncio.sleep(min(left_s, RETRY_AFTER_S * min(attempt, 10)))
        if info.num_blocks != loop.scheduler.pool.num_blocks:
            log.warning("the new ranks have room for %d cache blocks", info.num_blocks)
            loop.scheduler.use_pool(BlockPool(info.num_blocks, self.config.block_size))
        self._recovering = None
        self._recovered_s = loop.last_progress_s = time.monotonic()
        groups.prepare_spares(info)
        log.warning("recovered after %.2f s, epoch %d", self._recovered_s - began, self.epoch)
        return group

    def _check_patience(self, loop: EngineLoop, failure: RankFailure, now: float) -> None:
        """Raise `failure` where other ranks would not help: one group after the other does not get through a step."""
        if loop.num_steps > self._num_steps:
            self._num_fruitless = self._num_given_up = 0
        elif now - self._recovered_s > CALM_S:
            self._num_fruitless = 0
        else:
            self._num_fruitless += 1
        self._num_steps = loop.num_steps
        if self._num_fruitless > MAX_FRUITLESS or self._num_given_up > MAX_GIVEN_UP:
            raise RankFailure(
                f"{self._num_fruitless} groups of ranks in turn did not get through a step: {failure.message}"
            )

    async def _start_group(self, group: Group) -> GroupInfo:
        following = asyncio.create_task(self._follow_loading(group))
        try:
            info = await group.start()
        finally:
            following.cancel()
        # Ranks that take these ones' places on the same nodes need not read the same files again to check them.
        checked = self.config.checked.union(report.load.files_id for report in info.ranks)
        self.config = replace(self.config, checked=checked)
        return info

    def _give_up(self, error: LlamaError) -> None:
        """Every live request gets one error, and Serve replaces the replica."""
        log.error("the engine has failed: %s", error.message)
        self._failure = error
        if not isinstance(error, RankFailure):  # those were counted when they came
            self._on_failure(error)
        if self._loop is not None:
            self._loop.fail(error if isinstance(error, EngineError) else EngineError(error.message))


async def _run_until_failure(loop: EngineLoop, group: Group) -> RankFailure:
    """Serve until the ranks fail, with steps under way or idle. Raises what else goes wrong."""
    running = asyncio.create_task(loop.run(group))
    watching = asyncio.create_task(group.wait_failed())
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            return watching.result()
        try:
            await running
        except RankFailure as failure:
            return failure
        raise AssertionError("the loop ends with an error or not at all")
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


def _progress(status: RankStatus | None) -> str:
    if status is None:
        return "does not answer yet"
    if not status.bytes_total:
        return status.phase
    return f"{status.phase} ({100 * status.bytes_loaded // status.bytes_total} % of {status.bytes_total / 1e6:.0f} MB)"
