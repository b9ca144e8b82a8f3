"""Keeps ranks under the engine loop: others in the place of those that fail, fewer where a place is gone for good, all again
when it is back.

Every live request goes on from its tokens, so that its reader sees a pause. Knows nothing of HTTP, of prompts or of Serve.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn, Protocol

from cluster.driver.rank_group import GroupInfo
from cluster.driver.stragglers import Pace, straggler
from cluster.rank.rank_worker import RankStatus
from deployments.args import ServerArgs
from deployments.engine.engine_loop import EngineLoop, Runner
from deployments.engine.recovery_plan import Attempts
from llama_core.config import EngineConfig, ModelConfig
from llama_core.errors import CheckpointChanged, CheckpointError, LlamaError, RankFailure, TokenizerError
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.quarantine import FailureStreak

log = logging.getLogger(__name__)

LOADING_PERIOD_S: Final = 1.0
RETRY_AFTER_S: Final = 0.5  # between attempts to bring the ranks back; longer each time
LOOK_FOR_ROOM_S: Final = 10.0  # how often, while fewer ranks serve than should; more seldom each time it did not help
LONGEST_LOOK_S: Final = 600.0
PACE_PERIOD_S: Final = 5.0
# An attempt to bring ranks back may take so many times what the first start took, and at least so long.
TIMES_FIRST_START: Final = 5.0
SHORTEST_ATTEMPT_S: Final = 60.0


class Group(Runner, Protocol):
    """What this needs of a rank group; `cluster.driver.rank_group.RankGroup` is one, tests have another."""

    async def start(self) -> GroupInfo: ...
    async def statuses(self) -> Sequence[RankStatus | None]: ...
    async def wait_failed(self) -> RankFailure: ...
    async def stop(self) -> None: ...


class Groups(Protocol):
    """Where groups come from, one after the other; `cluster.driver.standby.RankGroups` is one.

    A seat is a rank's place in the cluster: seat i is that of rank i while all are there.
    """

    async def seats(self) -> list[int] | None:
        """Those that a rank could be started in now; None where nobody knows."""

    def open(self, config: EngineConfig, epoch: int, num_blocks: int | None, seats: Sequence[int]) -> Group:
        """One that has not started, with as many cache blocks, or None for as many as there is room for."""

    @property
    def num_spares(self) -> int:
        """Processes that could take over now."""

    def prepare_spares(self, info: GroupInfo) -> None: ...
    async def stop(self) -> None: ...


class RankKeeper:
    """`start` the first ranks, `serve` until even new ones would not help, `stop`. `on_failure` hears of every failure."""

    def __init__(
        self,
        args: ServerArgs,
        config: EngineConfig,
        model: ModelConfig,
        groups: Groups,
        on_failure: Callable[[LlamaError], None],
        on_pace: Callable[[Mapping[int, float]], None] = lambda own_ms: None,
    ) -> None:
        """on_pace: now and then is given the milliseconds of a step that each rank computed by itself, by rank."""
        self.num_ranks = args.num_ranks()  # that there should be
        self.num_ranks_now = self.num_ranks  # that serve, or did until they failed
        self.info: GroupInfo | None = None
        self.epoch = 0  # of the group that serves, or is to serve
        self.recovering: str | None = None  # from what
        self.loading = "the ranks are being placed"  # how far new ranks are, for people
        self._args = args
        self._config = config
        self._model = model
        self._groups = groups
        self._on_failure = on_failure
        self._on_pace = on_pace
        self._group: Group | None = None
        self._seats = list(range(self.num_ranks))  # of the group that serves, or is tried
        self._first_start_s = 0.0
        self._num_blocks: int | None = None  # that the first group had
        self._look_s = LOOK_FOR_ROOM_S
        self._streak = FailureStreak()
        self._recovered_s = 0.0

    async def start(self) -> GroupInfo:
        """Raises what kept the first ranks from coming up."""
        began = time.monotonic()
        self.info = await self._start_group(None)
        self._first_start_s = time.monotonic() - began
        self._num_blocks = self.info.num_blocks
        self._groups.prepare_spares(self.info)
        return self.info

    async def serve(self, loop: EngineLoop) -> NoReturn:
        """Raises LlamaError when the ranks cannot be brought back."""
        while True:
            assert self._group is not None
            pacing = asyncio.create_task(self._follow_pace(self._group))
            try:
                failure = await _run_until_failure(loop, self._group, self._room_again())
            finally:
                pacing.cancel()
            await self._recover(loop, failure)

    @property
    def is_reduced(self) -> bool:
        """Whether fewer ranks serve than should."""
        return len(self._seats) < self.num_ranks

    @property
    def num_spares(self) -> int:
        return self._groups.num_spares

    async def stop(self) -> None:
        """No process of any rank or spare remains when this returns."""
        await self._groups.stop()
        if self._group is not None:
            await self._group.stop()

    async def _recover(self, loop: EngineLoop, failure: RankFailure | None) -> None:
        """Bring up other ranks, with every live request ready to go on. `failure` is None where the old ones only give way to
        more. Raises what keeps them away."""
        attempts = Attempts(
            self._model,
            all_seats=list(range(self.num_ranks)),
            seats=self._seats,
            is_growth=failure is None,
            patience_s=self._args.shrink_after_s,
            least=self._args.min_ranks or 1,
        )
        self.recovering = "there is room for more ranks" if failure is None else failure.message
        self.loading = "being placed"
        if failure is not None:
            log.error("recovering %d live requests: %s", loop.num_live, failure.message)
            self._on_failure(failure)
        else:
            log.warning("growing under %d live requests to %d ranks", loop.num_live, self.num_ranks)
        assert self._group is not None
        await self._group.stop()
        if failure is not None:
            self._streak.failed(loop.num_steps, attempts.began - self._recovered_s)
            if (reason := self._streak.reason_to_give_up) is not None:
                raise RankFailure(f"{reason}: {failure.message}")
        info = await self._bring_up(loop, failure, attempts)
        if info.num_blocks != loop.scheduler.pool.num_blocks:
            log.warning("the new ranks have room for %d cache blocks", info.num_blocks)
            loop.scheduler.use_pool(BlockPool(info.num_blocks, self._config.block_size))
        self.info, self.num_ranks_now, self.recovering = info, len(self._seats), None
        self._recovered_s = loop.last_progress_s = time.monotonic()
        self._groups.prepare_spares(info)
        log.warning("recovered after %.2f s, epoch %d", self._recovered_s - attempts.began, self.epoch)
        if not self.is_reduced:
            self._look_s = LOOK_FOR_ROOM_S
        elif attempts.unlucky_seat is not None:  # it has its node, and is broken: those who serve pay for each new try
            self._look_s = LONGEST_LOOK_S
        else:
            self._look_s = min(self._look_s * (2 if attempts.is_growth else 1), LONGEST_LOOK_S)
        if self.is_reduced:
            log.warning("%d of %d ranks serve until there is room for all", len(self._seats), self.num_ranks)

    async def _bring_up(self, loop: EngineLoop, failure: RankFailure | None, attempts: Attempts) -> GroupInfo:
        deadline = attempts.began + self._args.recovery_timeout_s
        longest_s = max(SHORTEST_ATTEMPT_S, TIMES_FIRST_START * self._first_start_s)
        for attempt in itertools.count(1):
            self.epoch += 1
            if loop.restart(self.epoch, failure):
                self._streak.verdict_given()
            there = await self._groups.seats()
            if there is None:  # it is worth a try
                there = attempts.all_seats
            if seats := attempts.choose(there):
                self._seats = seats
                try:
                    async with asyncio.timeout(min(longest_s, deadline - time.monotonic())):
                        return await self._start_group(self._num_blocks)
                except Exception as error:
                    if (
                        isinstance(error, CheckpointError | CheckpointChanged | TokenizerError)
                        and not attempts.is_growth
                    ):
                        raise  # the same files say the same again
                    assert self._group is not None
                    await self._group.stop()
                    failure = self._as_failure(error)
                    attempts.failed.append(None if failure.rank is None else seats[failure.rank])
                    self.loading = f"attempt {attempt} failed: {failure.message}"
                    log.warning("%s", self.loading)
            else:
                missing = sorted(set(attempts.wanted) - set(there))
                self.loading = f"there is no room for rank {', '.join(map(str, missing))}"
                failure = RankFailure(self.loading)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                text = f"the ranks could not be brought back in {self._args.recovery_timeout_s:g} s: {failure.message}"
                raise RankFailure(text, rank=failure.rank)
            await asyncio.sleep(min(left_s, RETRY_AFTER_S * min(attempt, 10)))
        raise AssertionError("attempts end with ranks or with the time")

    def _as_failure(self, error: Exception) -> RankFailure:
        if isinstance(error, RankFailure):
            return error
        if isinstance(error, TimeoutError):
            return RankFailure(f"that took too long: {self.loading}")
        return RankFailure(f"{type(error).__name__}: {error}")

    async def _room_again(self) -> None:
        """Returns when all ranks surely have a place, on two looks in a row. Never while all of them serve."""
        num_looks = 0
        while num_looks < 2:
            await asyncio.sleep(self._look_s)
            if self.is_reduced:
                seats = await self._groups.seats()
                num_looks = num_looks + 1 if seats is not None and len(seats) == self.num_ranks else 0

    async def _follow_pace(self, group: Group) -> None:
        pace, slow = Pace(), None
        while True:
            try:
                own_ms = pace.look(await group.statuses())
            except Exception as error:  # it is for people; the group itself says when it fails
                log.warning("the ranks' pace is not known: %s", type(error).__name__)
                own_ms = {}
            self._on_pace(own_ms)
            was_slow, slow = slow, straggler(own_ms)
            if slow is not None and slow != was_slow:
                others = ", ".join(f"rank {rank} {ms:.2f} ms" for rank, ms in sorted(own_ms.items()))
                log.warning(
                    "rank %d is slow and holds the others up; of a step, each computes by itself: %s", slow, others
                )
            await asyncio.sleep(PACE_PERIOD_S)

    async def _start_group(self, num_blocks: int | None) -> GroupInfo:
        self._group = group = self._groups.open(self._config, self.epoch, num_blocks, self._seats)
        following = asyncio.create_task(self._follow_loading(group))
        try:
            info = await group.start()
        finally:
            following.cancel()
        self._remember_files(info)
        return info

    def _remember_files(self, info: GroupInfo) -> None:
        """Later ranks must load what the first ranks loaded, and do not read unchanged files again to verify them."""
        loads = [report.load for report in info.ranks]
        verified = {**self._config.verified, **{load.files_id: load.digest for load in loads}}
        expected = self._config.expected or (loads[0].digest if loads else None)
        self._config = replace(self._config, verified=verified, expected=expected)

    async def _follow_loading(self, group: Group) -> None:
        """Keep a sentence on how far each rank is, for whoever asks /ready."""
        while True:
            await asyncio.sleep(LOADING_PERIOD_S)
            statuses = await group.statuses()
            words = [f"rank {rank} {_progress(status)}" for rank, status in enumerate(statuses)]
            self.loading = ", ".join(words) or self.loading


async def _run_until_failure(
    loop: EngineLoop, group: Group, more_room: Coroutine[None, None, None]
) -> RankFailure | None:
    """Serve until the ranks fail, with steps under way or idle, or until there is room for more: None. Raises what else goes
    wrong.
    """
    running = asyncio.create_task(loop.run(group))
    watching = asyncio.create_task(group.wait_failed())
    looking = asyncio.create_task(more_room)
    try:
        await asyncio.wait((running, watching, looking), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            return watching.result()
        if looking.done() and not running.done():
            return looking.result()
        try:
            await running
        except RankFailure as failure:
            return failure
        raise AssertionError("the loop ends with an error or not at all")
    finally:
        for task in (running, watching, looking):
            task.cancel()
        await asyncio.gather(running, watching, looking, return_exceptions=True)


def _progress(status: RankStatus | None) -> str:
    if status is None:
        return "does not answer yet"
    if not status.bytes_total:
        return status.phase
    return f"{status.phase} ({100 * status.bytes_loaded // status.bytes_total} % of {status.bytes_total / 1e6:.0f} MB)"
