"""Recovery from failed ranks: every request continues, except one that makes the ranks fail."""

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from cluster.driver.group_info import GroupInfo
from deployments.args import ServerArgs
from deployments.engine import supervisor
from deployments.engine.recovery_plan import SAME_BUNDLE_ATTEMPTS
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from llama_core.errors import (
    CheckpointChanged,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    LlamaError,
    PoisonRequest,
    RankFailure,
)
from llama_core.scheduling.quarantine import (
    MAX_FAILURES_WITHOUT_PROGRESS,
    MAX_VERDICTS_WITHOUT_PROGRESS,
    SCORE_OF_A_DEATH,
    SCORE_OF_AN_ERROR,
)
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import StepInput, StepOutput
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool, until
from tests.support.fake_ranks import continuation

POISON = 599


class Crash(Exception):
    """Raised by a model where it would crash its rank."""


class Group(FakeGroup):
    """A group whose model may make it fail: by an exception if `raises`, else by a death."""

    def __init__(self, token: Callable[[list[int]], int], *, raises: bool = False) -> None:
        super().__init__(token=token, step_s=0.0005)
        self.raises = raises

    async def _compute(self, batch: StepInput) -> StepOutput:
        try:
            return await super()._compute(batch)
        except Crash:
            self.crash("rank 1 failed" if self.raises else "rank 1 died", raised=self.raises)
            return await asyncio.Future()

    def crash(self, message: str, *, raised: bool) -> None:
        if not self._failed.done():
            self._failed.set_result(RankFailure(message, rank=1, raised=raised))


class Served:
    """A service whose groups `make` creates, and the failures that it reported."""

    def __init__(self, make: Callable[[], FakeGroup], **changes: Any) -> None:
        self.groups = FakeGroupPool(make)
        self.failures: list[LlamaError] = []
        fields = {"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 64, "max_batch_size": 8, "recovery_timeout_s": 60}
        self.service = LlamaService(
            ServerArgs(**fields | changes), lambda: self.groups, on_failure=self.failures.append
        )

    async def __aenter__(self) -> "Served":
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop()

    def ask(self, prompt: list[int], max_tokens: int = 30) -> SequenceStream:
        return self.service.submit(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))


def prompts(count: int) -> list[list[int]]:
    return [[1, *range(3, 5 + n)] for n in range(count)]


def steady(tokens: list[int]) -> int:
    """A model that never samples EOS, so that a request's length is known."""
    return 3 + hash(tuple(tokens)) % 500


async def read(stream: SequenceStream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]


async def test_every_stream_continues_and_new_requests_wait_during_a_recovery() -> None:
    async with Served(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)
        gate = asyncio.Event()
        served.groups.make = lambda: _gated(Group(steady), gate)
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        readiness = served.service.readiness()
        assert (readiness.ready, readiness.phase, readiness.takes_requests) == (False, "recovering", True)
        assert "rank 1 died" in readiness.detail and served.service.live()
        reading.append(asyncio.create_task(read(served.ask(prompts(13)[-1]))))
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in reading)
        gate.set()
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in prompts(13)]
        assert served.service.readiness().ready
        assert served.groups.opened == [(0, None), (1, 64)], "the new group has as many blocks as the pool"
        assert [failure.message for failure in served.failures] == ["rank 1 died"]
        assert served.service.describe().epoch == 1


def _gated(group: FakeGroup, gate: asyncio.Event) -> FakeGroup:
    group.go = gate
    return group


async def test_ranks_that_die_while_idle_are_replaced() -> None:
    async with Served(lambda: Group(steady)) as served:
        served.groups.made[0].fail()
        await until(lambda: len(served.groups.made) == 2 and served.service.readiness().ready)
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)


@pytest.mark.parametrize("seed", range(5))
async def test_failures_at_any_moment_lose_or_repeat_no_token(seed: int) -> None:
    draw = random.Random(seed)
    async with Served(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(24)]
        for _ in range(12):
            num_groups, num_steps = len(served.groups.made), draw.randint(1, 14)
            ranks = served.groups.made[-1].ranks
            await until(
                lambda ranks=ranks, num=num_steps: ranks.num_steps >= num or all(task.done() for task in reading)  # type: ignore[misc]
            )
            served.groups.made[-1].fail()
            await until(lambda num=num_groups: len(served.groups.made) != num)  # type: ignore[misc]
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in prompts(24)]
        assert len(served.groups.made) > 5
        assert served.service.describe().blocks_used == 0


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "dies"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "among others"])
@pytest.mark.parametrize("at", [3, 20], ids=["in its prompt", "while it decodes"])
async def test_a_request_that_makes_the_ranks_fail_is_refused_alone(raises: bool, alone: bool, at: int) -> None:
    def poisonous(tokens: list[int]) -> int:
        if tokens[1] == POISON and len(tokens) >= at:
            raise Crash
        return steady(tokens)

    async with Served(lambda: Group(poisonous, raises=raises)) as served:
        others = prompts(0 if alone else 10)
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in others[:5]]
        poison = served.ask([1, POISON, 7])
        reading += [asyncio.create_task(read(served.ask(prompt))) for prompt in others[5:]]
        with pytest.raises(PoisonRequest, match=r"failed [3-6] times while they computed this request"):
            await read(poison)
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in others]
        # Neither the first failure nor, beside other requests, the second one convicts a request.
        assert len(served.failures) == (1 if alone else 2) + 1 / (SCORE_OF_AN_ERROR if raises else SCORE_OF_A_DEATH)
        assert served.service.describe().blocks_used == 0
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)


@pytest.mark.parametrize("num_poisonous", [2, 6])
async def test_several_harmful_requests_are_refused_and_the_others_complete(num_poisonous: int) -> None:
    def poisonous(tokens: list[int]) -> int:
        if tokens[1] == POISON and len(tokens) >= 12:
            raise Crash
        return steady(tokens)

    async with Served(lambda: Group(poisonous, raises=True)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(5)]
        results = await asyncio.gather(
            *(read(served.ask([1, POISON, 7 + i])) for i in range(num_poisonous)), return_exceptions=True
        )
        assert all(isinstance(result, PoisonRequest) for result in results)
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in prompts(5)]


@pytest.mark.parametrize("in_a_prompt", [True, False])
async def test_ranks_that_fail_repeatedly_in_their_first_steps_convict_no_request(in_a_prompt: bool) -> None:
    """New ranks compute a canary request first, so that a quarantined request is never alone in their first steps."""

    class Failing(Group):
        async def _compute(self, batch: StepInput) -> StepOutput:
            if len(served.groups.made) < 10 and in_a_prompt == any(row.length > 1 for row in batch.rows):
                self.crash("rank 1 failed", raised=True)
                return await asyncio.Future()
            return await super()._compute(batch)

    async with Served(lambda: Failing(steady)) as served:
        answers = await asyncio.gather(*(read(served.ask(prompt)) for prompt in prompts(6)))
        assert len(served.groups.made) == 10 and answers == [continuation(prompt, 30, steady) for prompt in prompts(6)]


async def test_a_group_that_fails_to_start_is_tried_again() -> None:
    async with Served(lambda: Group(steady)) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)

        def broken() -> FakeGroup:
            group = Group(steady)
            group.start_error = RankFailure("rank 0 died while loading") if len(served.groups.made) < 3 else None
            return group

        served.groups.make = broken
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]
        assert [epoch for epoch, _ in served.groups.opened] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("error", "timeout_s"),
    [(CheckpointError("consolidated.00.pth: gone"), 60.0), (RankFailure("no room"), 0.2)],
    ids=["an error that no retry changes fails at once", "another error fails at the timeout"],
)
async def test_ranks_that_cannot_be_brought_back_fail_the_replica(error: LlamaError, timeout_s: float) -> None:
    async with Served(lambda: Group(steady), recovery_timeout_s=timeout_s) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)

        def broken() -> FakeGroup:
            group = Group(steady)
            group.start_error = error
            return group

        served.groups.make = broken
        served.groups.made[0].fail()
        with pytest.raises(LlamaError, match=error.message):
            await read(stream)
        assert not served.service.live() and served.service.readiness().phase == "failed"


async def test_groups_that_never_complete_a_step_fail_the_replica_and_no_request_is_refused() -> None:
    def broken(tokens: list[int]) -> int:
        raise Crash

    async with Served(lambda: Group(broken)) as served:
        results = await asyncio.gather(*(read(served.ask(prompt)) for prompt in prompts(20)), return_exceptions=True)
        assert all(isinstance(result, RankFailure) for result in results)
        assert not served.service.live() and "did not complete a step" in served.service.readiness().detail
        assert len(served.groups.made) == MAX_FAILURES_WITHOUT_PROGRESS + 2


async def test_too_many_verdicts_without_a_completed_step_fail_the_replica() -> None:
    def broken(tokens: list[int]) -> int:
        if tokens[:2] != [2, 2]:  # the canary request's prompt
            raise Crash
        return steady(tokens)

    async with Served(lambda: Group(broken)) as served:
        # One request after the other is refused, until the limit of verdicts.
        results = await asyncio.gather(*(read(served.ask(prompt)) for prompt in prompts(20)), return_exceptions=True)
        assert all(isinstance(result, LlamaError) for result in results)
        assert not served.service.live() and "no step completed" in served.service.readiness().detail
        num_verdicts = sum(isinstance(result, PoisonRequest) for result in results)
        assert num_verdicts == MAX_VERDICTS_WITHOUT_PROGRESS + 1 and len(served.groups.made) < 5 * num_verdicts


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "dies"])
async def test_a_harmful_request_that_is_cancelled_and_sent_again_convicts_no_other(raises: bool) -> None:
    def poisonous(tokens: list[int]) -> int:
        if tokens[1] == POISON:
            raise Crash
        return steady(tokens)

    async with Served(lambda: Group(poisonous, raises=raises)) as served:
        neighbour = asyncio.create_task(read(served.ask([1, 5], 40)))
        for _ in range(8):
            num_groups = len(served.groups.made)
            poison = served.ask([1, POISON, 7])
            await until(lambda num=num_groups: len(served.groups.made) != num)  # type: ignore[misc]
            poison.cancel()
        assert await neighbour == continuation([1, 5], 40, steady)


@pytest.mark.parametrize("num_blocks", [40, 90])
async def test_new_ranks_may_have_another_number_of_cache_blocks(num_blocks: int) -> None:
    async with Served(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)

        def other() -> FakeGroup:
            group = Group(steady)
            group.num_blocks = num_blocks
            return group

        served.groups.make = other
        served.groups.made[0].fail()
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in prompts(12)]
        assert served.service.describe().blocks_total == num_blocks


async def test_an_attempt_that_hangs_ends_at_the_recovery_timeout() -> None:
    async with Served(lambda: Group(steady), recovery_timeout_s=0.2) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.make = lambda: _gated(Group(steady), asyncio.Event())
        served.groups.made[0].fail()
        with pytest.raises(RankFailure, match=r"could not be brought back in 0\.2 s"):
            await read(stream)
        assert not served.service.live()


async def test_a_passing_error_of_one_attempt_is_tried_again() -> None:
    async with Served(lambda: Group(steady)) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)

        class Failing(Group):
            async def start(self) -> GroupInfo:
                if len(served.groups.made) == 2:
                    raise OSError("too many open files")
                return await super().start()

        served.groups.make = lambda: Failing(steady)
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]


async def test_a_replaced_checkpoint_ends_every_stream_and_the_replica() -> None:
    """New ranks compare the files with those that the first ranks loaded; no further attempt can help."""
    async with Served(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(3)]
        await asyncio.sleep(0.01)

        def other() -> FakeGroup:
            group = Group(steady)
            group.start_error = CheckpointChanged("consolidated.00.pth: rank 1 on b found other contents")
            return group

        served.groups.make = other
        served.groups.made[0].fail()
        results = await asyncio.gather(*reading, return_exceptions=True)
        assert [(type(result), str(result)) for result in results] == [
            (CheckpointChanged, "consolidated.00.pth: rank 1 on b found other contents")
        ] * 3
        assert len(served.groups.made) == 2 and not served.service.live()
        with pytest.raises(CheckpointChanged):
            served.ask([1, 5])


@pytest.mark.parametrize("end", ["cancel", "deadline", "drain", "stop"])
async def test_requests_may_end_during_a_recovery(end: str) -> None:
    async with Served(lambda: Group(steady), drain_timeout_s=120) as served:
        stream, gate = served.ask([1, 5], 20), asyncio.Event()
        await anext(stream)
        served.groups.make = lambda: _gated(Group(steady), gate)
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        if end == "stop":
            await served.service.stop()
        elif end == "drain":
            draining = asyncio.create_task(served.service.drain())
            await asyncio.sleep(0.01)
            assert not draining.done()
            gate.set()
            assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]
            await draining
            return
        elif end == "cancel":
            stream.cancel()
        else:
            stream.end(DeadlineExceeded("late"))
        with pytest.raises(LlamaError):
            await read(stream)
        assert not served.service.describe().blocks_used
        async with asyncio.timeout(60):
            await served.service.drain()  # no live request is left


async def test_a_replica_is_not_taken_for_dead_after_a_long_recovery() -> None:
    async with Served(lambda: Group(steady), step_timeout_s=0.01) as served:
        stream, gate = served.ask([1, 5], 20), asyncio.Event()
        await anext(stream)
        served.groups.make = lambda: _gated(Group(steady), gate)
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        assert served.service._loop is not None
        served.service._loop.last_progress_s -= 1000
        assert served.service.live()
        gate.set()
        await until(lambda: served.service.readiness().phase == "ready")
        assert served.service.live()


def with_two_ranks(**changes: Any) -> Served:
    return Served(lambda: Group(steady), **{"model_parallel_size": 2, "shrink_after_s": 0.05} | changes)


async def test_fewer_ranks_serve_without_a_node_and_all_ranks_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "ROOM_CHECK_S", 0.01)
    async with with_two_ranks(shrink_after_s=0.5) as served:
        reading = [asyncio.create_task(read(served.ask(prompt, 50))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)
        room = [1]
        served.groups.room = lambda: room
        served.groups.made[0].fail()
        await until(lambda: "there is no room for rank 1" in served.service.readiness().detail)
        await until(lambda: len(served.groups.made) == 2 and served.service.readiness().ready)
        readiness = served.service.readiness()
        assert readiness.ready and readiness.detail == "with 1 of 2 ranks, for lack of room"
        assert served.service.describe().world_size == 1
        room.append(2)
        await until(lambda: len(served.groups.made) >= 3)
        assert await asyncio.gather(*reading) == [continuation(prompt, 50, steady) for prompt in prompts(12)]
        assert served.groups.bundles_opened == [[1, 2], [1], [1, 2]]
        assert served.service.describe().world_size == 2 and len(served.failures) == 1, "growth is no failure"
        scheduler = served.service._loop.scheduler  # type: ignore[union-attr]
        assert not any(map(scheduler.quarantine.num_failures, scheduler.live()))


async def test_a_failure_of_fewer_ranks_does_not_wait_for_the_others_again() -> None:
    async with with_two_ranks() as served:
        served.groups.room = lambda: [1]
        served.groups.made[0].fail()
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)
        served.groups.room = lambda: [1, 2]  # its node may be alive with a failed GPU
        num_attempts = served.service.describe().epoch
        served.groups.made[1].fail()
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)
        assert served.groups.bundles_opened == [[1, 2], [1], [1]]
        assert served.service.describe().epoch == num_attempts + 1, "the first attempt"


async def test_a_hanging_attempt_is_followed_by_another_and_readiness_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SHORTEST_ATTEMPT_S", 0.05)
    monkeypatch.setattr(supervisor, "TIMES_FIRST_START", 0.0)
    monkeypatch.setattr(supervisor, "RETRY_AFTER_S", 0.2)
    async with Served(lambda: Group(steady)) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.make = lambda: _gated(Group(steady), asyncio.Event())
        served.groups.made[0].fail()
        await until(
            lambda: re.search(r"attempt \d+ failed: the start took too long", served.service.readiness().detail)
        )
        served.groups.make = lambda: Group(steady)
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]


@pytest.mark.parametrize(
    "error",
    [CheckpointError("consolidated.01.pth: no such file"), CheckpointChanged("consolidated.01.pth: other contents")],
    ids=["without the files", "with other files"],
)
async def test_a_node_that_joins_with_an_unusable_checkpoint_ends_no_stream(
    error: LlamaError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ROOM_CHECK_S", 0.01)
    async with with_two_ranks() as served:

        def broken() -> FakeGroup:
            group = Group(steady)
            if len(served.groups.bundles_opened) == 3:
                group.start_error = error
            return group

        served.groups.make = broken
        served.groups.room = lambda: [1] if len(served.groups.made) == 1 else [1, 2]
        served.groups.made[0].fail()
        await until(lambda: len(served.groups.made) >= 4)
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)
        assert served.groups.bundles_opened[:4] == [[1, 2], [1], [1, 2], [1]]


async def test_a_checkpoint_replaced_before_the_ranks_grow_ends_every_stream_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "ROOM_CHECK_S", 0.01)
    async with with_two_ranks() as served:

        def replaced() -> FakeGroup:
            group = Group(steady)
            if len(served.groups.bundles_opened) >= 3:
                group.start_error = CheckpointChanged("consolidated.00.pth: other contents")
            return group

        served.groups.make = replaced
        served.groups.room = lambda: [1] if len(served.groups.made) == 1 else [1, 2]
        served.groups.made[0].fail()
        await until(lambda: not served.service.live())
        with pytest.raises(CheckpointChanged):
            served.ask([1, 5])
        assert served.groups.bundles_opened == [[1, 2], [1], [1, 2], [1]]


def too_small(served: "Served") -> Callable[[], FakeGroup]:
    """Groups that start on two ranks only."""

    def make() -> FakeGroup:
        group = Group(steady)
        if len(served.groups.bundles_opened[-1]) == 1:
            group.start_error = ConfigError("rank 0 needs 9 GB, 5 GB are free")
        return group

    return make


async def test_live_requests_wait_for_room_where_fewer_ranks_cannot_hold_them() -> None:
    async with with_two_ranks(recovery_timeout_s=60.0) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.make = too_small(served)
        asked = 0

        def room() -> list[int]:
            nonlocal asked
            asked += 1
            return [1] if asked < 3 else [1, 2]

        served.groups.room = room
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]
        assert served.groups.bundles_opened == [[1, 2], [1], [1, 2]], "the smaller group is tried once"


async def test_a_wait_for_more_ranks_ends_at_the_recovery_timeout_with_its_reason() -> None:
    async with with_two_ranks(recovery_timeout_s=0.3) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.make = too_small(served)
        served.groups.room = lambda: [1]
        served.groups.made[0].fail()
        with pytest.raises(RankFailure, match=r"1 of 2 ranks cannot serve: rank 0 needs 9 GB, 5 GB are free"):
            await read(stream)
        assert not served.service.live() and len(served.groups.made) == 2


async def test_a_configuration_error_of_as_many_ranks_as_before_is_tried_again() -> None:
    """Free memory may be short until the processes of a failed group are gone."""
    async with with_two_ranks() as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)

        def short_of_memory() -> FakeGroup:
            group = Group(steady)
            group.start_error = ConfigError("5 GB are free") if len(served.groups.made) == 1 else None
            return group

        served.groups.make = short_of_memory
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]
        assert len(served.groups.made) == 3


async def test_all_ranks_that_have_room_go_on_serving() -> None:
    async with Served(
        lambda: Group(steady), ckpt_dir="demo", model_parallel_size=4, shrink_after_s=0.0, max_seq_len=64
    ) as served:
        served.groups.room = lambda: [1, 3, 4]
        served.groups.made[0].fail()
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)
        assert served.groups.bundles_opened == [[1, 2, 3, 4], [1, 3, 4]]


async def test_fewer_ranks_than_min_ranks_never_serve() -> None:
    async with with_two_ranks(min_ranks=2, recovery_timeout_s=0.3) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.room = lambda: [2]
        served.groups.made[0].fail()
        with pytest.raises(RankFailure, match=r"could not be brought back in 0\.3 s: there is no room for rank 0"):
            await read(stream)
        assert not served.service.live() and len(served.groups.made) == 1


async def test_a_bundle_that_every_attempt_fails_in_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RETRY_AFTER_S", 0.001)
    async with with_two_ranks() as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)

        def broken() -> FakeGroup:
            group = Group(steady)
            if len(served.groups.bundles_opened[-1]) == 2:
                group.start_error = RankFailure("rank 0 failed while loading: no such GPU", rank=0)
            return group

        served.groups.make = broken
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]
        assert served.groups.bundles_opened[-1] == [2] and len(served.groups.bundles_opened) > SAME_BUNDLE_ATTEMPTS
        assert served.service._supervisor is not None
        # Each attempt would interrupt the serving ranks.
        assert served.service._supervisor._room_check_s == supervisor.LONGEST_ROOM_CHECK_S


async def test_serving_ranks_are_not_replaced_while_the_usable_bundles_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "ROOM_CHECK_S", 0.01)
    async with with_two_ranks() as served:
        served.groups.room = lambda: [1]
        served.groups.made[0].fail()
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)
        served.groups.room = lambda: None
        await asyncio.sleep(0.1)
        assert len(served.groups.made) == 2 and served.service.readiness().ready
        served.groups.made[1].fail()  # after a failure an attempt costs nothing
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)
        assert served.groups.bundles_opened == [[1, 2], [1], [1]]


async def test_a_failed_attempt_to_grow_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ROOM_CHECK_S", 0.01)
    monkeypatch.setattr(supervisor, "RETRY_AFTER_S", 0.001)
    async with with_two_ranks() as served:
        stream = served.ask([1, 5], 60)
        await anext(stream)

        def broken() -> FakeGroup:
            group = Group(steady)
            if len(served.groups.bundles_opened) == 3:
                group.start_error = RankFailure("rank 1 died while loading", rank=1)
            return group

        served.groups.make = broken
        served.groups.room = lambda: [1] if len(served.groups.made) == 1 else [1, 2]
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 60, steady)[-5:]
        await until(lambda: len(served.groups.made) >= 5)
        assert served.groups.bundles_opened == [[1, 2], [1], [1, 2], [1], [1, 2]]
