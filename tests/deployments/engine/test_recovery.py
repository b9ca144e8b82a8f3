"""Recovery from failed ranks: every request continues, on new ranks."""

import asyncio
import random

import pytest

from llama_core.errors import CheckpointChanged, CheckpointError, DeadlineExceeded, LlamaError, NotReady, RankFailure
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.recovering_service import Group, RecoveringService, gated, prompts, read, steady


async def test_every_stream_continues_and_new_requests_wait_during_a_recovery() -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)
        gate = asyncio.Event()
        served.groups.make = lambda: gated(Group(steady), gate)
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


async def test_ranks_that_die_while_idle_are_replaced() -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
        served.groups.made[0].fail()
        await until(lambda: len(served.groups.made) == 2 and served.service.readiness().ready)
        assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)


@pytest.mark.parametrize("seed", range(5))
async def test_failures_at_any_moment_lose_or_repeat_no_token(seed: int) -> None:
    draw = random.Random(seed)
    async with RecoveringService(lambda: Group(steady)) as served:
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


async def test_a_group_that_fails_to_start_is_tried_again() -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
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
    async with RecoveringService(lambda: Group(steady), recovery_timeout_s=timeout_s) as served:
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


@pytest.mark.parametrize("num_blocks", [40, 90])
async def test_new_ranks_may_have_another_number_of_cache_blocks(num_blocks: int) -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
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
    async with RecoveringService(lambda: Group(steady), recovery_timeout_s=0.2) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.make = lambda: gated(Group(steady), asyncio.Event())
        served.groups.made[0].fail()
        with pytest.raises(RankFailure, match=r"could not be brought back in 0\.2 s"):
            await read(stream)
        assert not served.service.live()


async def test_a_replaced_checkpoint_ends_every_stream_and_the_replica() -> None:
    """New ranks compare the files with those that the first ranks loaded; no further attempt can help."""
    async with RecoveringService(lambda: Group(steady)) as served:
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
        with pytest.raises(NotReady, match="contents"):
            served.ask([1, 5])


@pytest.mark.parametrize("end", ["cancel", "deadline", "drain", "stop"])
async def test_requests_may_end_during_a_recovery(end: str) -> None:
    async with RecoveringService(lambda: Group(steady), drain_timeout_s=120) as served:
        stream, gate = served.ask([1, 5], 20), asyncio.Event()
        await anext(stream)
        served.groups.make = lambda: gated(Group(steady), gate)
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
    async with RecoveringService(lambda: Group(steady), step_timeout_s=0.01) as served:
        stream, gate = served.ask([1, 5], 20), asyncio.Event()
        await anext(stream)
        served.groups.make = lambda: gated(Group(steady), gate)
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        assert served.service._loop is not None
        served.service._loop.last_progress_s -= 1000
        assert served.service.live()
        gate.set()
        await until(lambda: served.service.readiness().phase == "ready")
        assert served.service.live()
