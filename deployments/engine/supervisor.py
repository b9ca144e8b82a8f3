"""Keeps ranks running for the engine loop: replaces failed ranks, uses fewer where a node is lost, and all of them again when
there is room.

Every live request continues from its tokens, so its reader sees a pause. Knows nothing of HTTP, of prompts or of Serve.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, NoReturn, Protocol

from cluster.driver.group_info import GroupInfo
from cluster.driver.placement import FIRST_RANK_BUNDLE, rank_bundle_indices
from cluster.driver.stragglers import StepWindow
from cluster.wire.rank_status import Phase, RankStatus
from deployments.args import EngineArgs
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.recovery_plan import RecoveryPlan
from deployments.engine.step_runner import StepRunner
from deployments.engine.straggler_watch import watch_stragglers
from llama_core.config import EngineConfig
from llama_core.errors import (
    CheckpointChanged,
    CheckpointError,
    ConfigError,
    DamagedDownload,
    FetchError,
    LlamaError,
    RankFailure,
    TokenizerError,
)
from llama_core.scheduling.quarantine import FailureStreak

log = logging.getLogger(__name__)

PROGRESS_PERIOD_S: Final = 1.0
RETRY_AFTER_S: Final = 0.5  # between attempts to start ranks; longer with each attempt
ROOM_CHECK_S: Final = 10.0  # while fewer ranks serve than configured; doubles with each attempt to grow that fails
LONGEST_ROOM_CHECK_S: Final = 600.0
# The limit of an attempt to start ranks: this many times the first start's time, and a minimum in seconds.
TIMES_FIRST_START: Final = 5.0
SHORTEST_ATTEMPT_S: Final = 60.0
MAX_REPLACEMENTS: Final = 64  # remembered, for the traces of requests that lived through them
# Another attempt would read the same files.
_SAME_AGAIN: Final = (CheckpointError, CheckpointChanged, TokenizerError)


class Replacement(NamedTuple):
    """One recovery, by time.monotonic. rank: the one that failed, if one is known. epoch: of the new ranks."""

    failed_s: float
    resumed_s: float
    rank: int | None
    epoch: int


class Group(StepRunner, Protocol):
    """A rank group as the supervisor uses it. Implemented by `cluster.driver.rank_group.RankGroup`."""

    async def start(self) -> GroupInfo: ...
    async def statuses(self) -> Sequence[RankStatus | None]: ...
    async def wait_failed(self) -> RankFailure: ...
    async def stop(self) -> None: ...


class GroupPool(Protocol):
    """Opens rank groups, one after the other. Implemented by `cluster.driver.standby.StandbyPool`.

    Bundles are Ray's indices in the placement group; bundle 1 + r is rank r's while all ranks serve.
    """

    async def usable_bundles(self) -> list[int] | None:
        """Rank bundles whose node is alive; None if that is unknown."""

    async def fetch(self) -> None:
        """Have remote models on every node with a usable bundle, while ranks serve."""

    def open_group(
        self, config: EngineConfig, epoch: int, num_blocks: int | None, bundle_indices: Sequence[int]
    ) -> Group:
        """An unstarted group with at most `num_blocks` cache blocks, or as many as fit if None."""

    @property
    def num_standby(self) -> int:
        """Warm standby processes that could take over now."""

    def prepare_standby(self, info: GroupInfo) -> None: ...
    async def stop(self) -> None: ...


class Supervisor:
    """`start` starts the first ranks, `serve` keeps ranks running until that is impossible, `stop` ends all."""

    def __init__(
        self,
        args: EngineArgs,
        config: EngineConfig,
        pool: GroupPool,
        on_failure: Callable[[LlamaError], None],
        on_compute_ms: Callable[[Mapping[int, float]], None] = lambda compute_ms: None,
    ) -> None:
        """on_failure: gets every failure. on_compute_ms: gets, every few seconds, the milliseconds of a step that each rank
        computed without waiting, by rank."""
        self.num_ranks = args.num_ranks()  # as configured
        self.num_ranks_now = self.num_ranks  # ranks that serve, or served last
        self.info: GroupInfo | None = None
        self.context_limit: str | None = None  # why the first ranks took a shorter context than the model's
        self.epoch = 0  # of the group that serves, or is being started
        self.recovering: str | None = None  # the reason
        self.replacements: deque[Replacement] = deque(maxlen=MAX_REPLACEMENTS)
        self.step_window = StepWindow()  # the latest with steps in it
        self.loading = "the ranks are being placed"  # the progress of new ranks, as a sentence
        self.is_fetching = False  # whether one of them waits for files of a remote model
        self._args = args
        self.config = config
        self._pool = pool
        self._on_failure = on_failure
        self._on_compute_ms = on_compute_ms
        self._group: Group | None = None
        self._all_bundles = rank_bundle_indices(self.num_ranks)
        self._bundles = self._all_bundles  # of the group that serves, or is being started
        self._first_start_s = 0.0
        self._num_blocks: int | None = None  # of the first group
        self._room_check_s = ROOM_CHECK_S
        self._streak = FailureStreak()
        self._resumed_s = 0.0  # when the ranks last came up after a failure

    async def start(self) -> GroupInfo:
        """Start the first ranks. Raises the error that prevented it."""
        began = time.monotonic()
        try:
            self.info = await self._start_group(None)
        except DamagedDownload as error:
            log.warning("%s", error.message)
            self.info = await self._start_group(None)
        self._first_start_s = time.monotonic() - began
        self._num_blocks = self.info.num_blocks
        self._pool.prepare_standby(self.info)
        return self.info

    async def serve(self, loop: EngineLoop) -> NoReturn:
        """Replace failed ranks. Raises LlamaError when no ranks can be started."""
        while True:
            assert self._group is not None
            watching = asyncio.create_task(watch_stragglers(self._group.statuses, self._on_window))
            try:
                failure = await _run_until_failure(loop, self._group, self._room_for_all())
            finally:
                watching.cancel()
            await self._recover(loop, failure)

    def _on_window(self, window: StepWindow) -> None:
        self._on_compute_ms(window.compute_ms)
        if window.num_steps:
            self.step_window = window

    @property
    def is_reduced(self) -> bool:
        """Whether fewer ranks serve than configured."""
        return len(self._bundles) < self.num_ranks

    @property
    def num_standby(self) -> int:
        return self._pool.num_standby

    async def stop(self) -> None:
        """No process of any rank and no standby process remains when this returns."""
        await self._pool.stop()
        if self._group is not None:
            await self._group.stop()

    async def _recover(self, loop: EngineLoop, failure: RankFailure | None) -> None:
        """Start other ranks and let every live request continue on them. `failure` is None where more ranks replace
        healthy ones. Raises LlamaError if no ranks can be started."""
        plan = RecoveryPlan(
            all_bundles=self._all_bundles,
            bundles=self._bundles,
            is_growth=failure is None,
            patience_s=self._args.shrink_after_s,
            min_ranks=self._args.min_ranks or 1,
        )
        self.recovering = "there is room for more ranks" if failure is None else failure.message
        self.loading = "being placed"
        if failure is not None:
            log.error("recovering %d live requests: %s", loop.num_live, failure.message)
            self._on_failure(failure)
        else:
            log.info("there is room for all %d ranks: restarting with %d live requests", self.num_ranks, loop.num_live)
        assert self._group is not None
        await self._group.stop()
        if failure is not None:
            self._streak.failed(loop.num_steps, plan.began - self._resumed_s)
            if (reason := self._streak.reason_to_give_up) is not None:
                raise RankFailure(f"{reason}: {failure.message}")
        info = await self._bring_up(loop, failure, plan)
        loop.resumed(info.num_blocks)
        self._resumed_s = time.monotonic()
        self.info, self.num_ranks_now, self.recovering = info, len(self._bundles), None
        rank = None if failure is None else failure.rank
        self.replacements.append(Replacement(plan.began, self._resumed_s, rank, self.epoch))
        self._pool.prepare_standby(info)
        log.warning("recovered after %.2f s, epoch %d", self._resumed_s - plan.began, self.epoch)
        self._set_room_check(plan)

    def _set_room_check(self, plan: RecoveryPlan) -> None:
        if not self.is_reduced:
            self._room_check_s = ROOM_CHECK_S
            return
        log.warning("%d of %d ranks serve until there is room for all", len(self._bundles), self.num_ranks)
        if plan.faulty_bundle is not None:
            # The bundle's node is alive, so only an attempt shows whether it works, and each attempt pauses all requests.
            self._room_check_s = LONGEST_ROOM_CHECK_S
        else:
            self._room_check_s = min(self._room_check_s * (2 if plan.is_growth else 1), LONGEST_ROOM_CHECK_S)

    async def _bring_up(self, loop: EngineLoop, failure: RankFailure | None, plan: RecoveryPlan) -> GroupInfo:
        deadline = plan.began + self._args.recovery_timeout_s
        longest_s = max(SHORTEST_ATTEMPT_S, TIMES_FIRST_START * self._first_start_s)
        for attempt in itertools.count(1):
            self.epoch += 1
            if loop.restart(self.epoch, failure):
                self._streak.verdict_given()
            usable = await self._pool.usable_bundles()
            if usable is None:  # unknown: try
                usable = plan.all_bundles
            if bundles := plan.choose(usable):
                self._bundles = bundles
                try:
                    async with asyncio.timeout(min(longest_s, deadline - time.monotonic())):
                        return await self._start_group(self._num_blocks)
                except Exception as error:
                    if (
                        isinstance(error, _SAME_AGAIN)
                        and not isinstance(error, FetchError)
                        and not plan.is_first_growth
                    ):
                        raise
                    assert self._group is not None
                    await self._group.stop()
                    failure = self._as_failure(error)
                    if isinstance(error, ConfigError) and len(bundles) < min(self.num_ranks, len(plan.bundles)):
                        # So few ranks have too little memory. Live requests wait until there is room for more ranks.
                        plan.too_few = f"{len(bundles)} of {self.num_ranks} ranks cannot serve: {error.message}"
                        plan.min_ranks = len(bundles) + 1
                        failure = RankFailure(plan.too_few)
                    plan.failed_bundles.append(None if failure.rank is None else bundles[failure.rank])
                    self.loading = f"attempt {attempt} failed: {failure.message}"
                    log.warning("%s", self.loading)
            else:
                missing = sorted(bundle - FIRST_RANK_BUNDLE for bundle in set(plan.wanted) - set(usable))
                self.loading = f"there is no room for rank {', '.join(map(str, missing))}"
                if plan.too_few is not None:
                    self.loading += f", and {plan.too_few}"
                failure = RankFailure(self.loading)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                text = f"the ranks could not be brought back in {self._args.recovery_timeout_s:g} s: {failure.message}"
                raise RankFailure(text, rank=failure.rank)
            await asyncio.sleep(min(left_s, RETRY_AFTER_S * min(attempt, 10)))
        raise AssertionError("the attempts end with ranks or at the deadline")

    def _as_failure(self, error: Exception) -> RankFailure:
        if isinstance(error, RankFailure):
            return error
        if isinstance(error, TimeoutError):
            return RankFailure(f"the start took too long: {self.loading}")
        return RankFailure(f"{type(error).__name__}: {error}")

    async def _room_for_all(self) -> None:
        """Returns when two checks in a row found a living node for every rank, and these nodes have the model. Never while all
        ranks serve."""
        num_checks = 0
        while True:
            await asyncio.sleep(self._room_check_s)
            if not self.is_reduced:
                continue
            usable = await self._pool.usable_bundles()
            num_checks = num_checks + 1 if usable is not None and len(usable) == self.num_ranks else 0
            if num_checks < 2:
                continue
            try:
                return await self._pool.fetch()
            except LlamaError as error:
                log.warning("there is room for all ranks, but not every node has the model: %s", error.message)

    async def _start_group(self, num_blocks: int | None) -> GroupInfo:
        self._group = group = self._pool.open_group(self.config, self.epoch, num_blocks, self._bundles)
        following = asyncio.create_task(self._follow_loading(group))
        try:
            info = await group.start()
        finally:
            following.cancel()
        self._remember_files(info)
        self._remember_context(info)
        return info

    def _remember_files(self, info: GroupInfo) -> None:
        """Later ranks must load the same contents, and need not read unchanged files again to verify them."""
        verified = {**self.config.verified, **{report.files_id: report.digest for report in info.ranks}}
        expected = self.config.expected or (info.ranks[0].digest if info.ranks else None)
        self.config = replace(self.config, verified=verified, expected=expected)

    def _remember_context(self, info: GroupInfo) -> None:
        """Later ranks must hold the context that the first ones have chosen: live requests may need all of it."""
        if info.max_seq_len is not None:
            self.context_limit = self.context_limit or info.context_limit
            self.config = replace(self.config, max_seq_len=info.max_seq_len, lowers_max_seq_len=False)

    async def _follow_loading(self, group: Group) -> None:
        """Keep a sentence about each rank's progress for /ready."""
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            statuses = await group.statuses()
            self.is_fetching = any(status is not None and status.phase is Phase.FETCHING for status in statuses)
            words = [f"rank {rank} {_progress_text(status)}" for rank, status in enumerate(statuses)]
            self.loading = ", ".join(words) or self.loading


async def _run_until_failure(
    loop: EngineLoop, group: Group, room_for_all: Coroutine[None, None, None]
) -> RankFailure | None:
    """Serve until the ranks fail, also while idle, or until `room_for_all` returns, which gives None. Raises other errors of
    the loop.
    """
    running = asyncio.create_task(loop.run(group))
    failing = asyncio.create_task(group.wait_failed())
    growing = asyncio.create_task(room_for_all)
    try:
        await asyncio.wait((running, failing, growing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            return failing.result()
        if growing.done() and not running.done():
            return growing.result()
        try:
            await running
        except RankFailure as failure:
            return failure
        raise AssertionError("the loop ends with an error or not at all")
    finally:
        for task in (running, failing, growing):
            task.cancel()
        await asyncio.gather(running, failing, growing, return_exceptions=True)


def _progress_text(status: RankStatus | None) -> str:
    if status is None:
        return "does not answer yet"
    if not status.bytes_total:
        return status.phase
    return f"{status.phase} ({100 * status.bytes_loaded // status.bytes_total} % of {status.bytes_total / 1e6:.0f} MB)"
