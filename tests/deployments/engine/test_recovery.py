"""Recovery from failed ranks: every request continues, on new ranks. `tests/simulation` has failures at any moment."""

import asyncio
from collections.abc import Callable

import pytest

from llama_core.errors import CheckpointChanged, CheckpointError, DeadlineExceeded, EngineError, LlamaError, RankFailure
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.recovering_service import Group, RecoveringService, gated, prompts, read, steady
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}


def starting(error: LlamaError | None = None, num_blocks: int = 64) -> FakeGroup:
    """A group whose start fails with this error."""
    group = Group(steady)
    group.start_error, group.num_blocks = error, num_blocks
    return group


async def test_every_stream_continues_and_new_requests_wait_during_a_recovery() -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)
        gate = asyncio.Event()
        served.groups.make = lambda: gated(Group(steady), gate)
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        readiness = served.service.readiness()
        assert (readiness.ready, readiness.takes_requests, served.service.live()) == (False, True, True)
        assert "rank 1 died" in readiness.detail
        reading.append(asyncio.create_task(read(served.ask(prompts(13)[-1]))))
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in reading)
        gate.set()
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in prompts(13)]
        assert served.service.readiness().ready
        assert served.groups.opened == [(0, None), (1, 64)], "the new group has as many blocks as the pool"
        assert [failure.message for failure in served.failures] == ["rank 1 died"]
        assert served.service.describe().epoch == 1


@pytest.mark.parametrize(
    ("make", "timeout_s", "expected"),
    [
        (lambda: starting(CheckpointError("01.pth: gone")), 60.0, EngineError("01.pth: gone")),
        (lambda: starting(CheckpointChanged("other contents")), 60.0, CheckpointChanged("other contents")),
        (lambda: starting(RankFailure("no room")), 0.2, RankFailure("no room")),
        (lambda: gated(Group(steady), asyncio.Event()), 0.2, RankFailure("could not be brought back in 0.2 s")),
    ],
    ids=["no retry changes it", "other files", "a failure at each attempt", "an attempt that hangs"],
)
async def test_ranks_that_cannot_be_brought_back_end_every_stream_and_the_replica(
    make: Callable[[], FakeGroup], timeout_s: float, expected: LlamaError
) -> None:
    async with RecoveringService(lambda: Group(steady), recovery_timeout_s=timeout_s) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(3)]
        await asyncio.sleep(0.01)
        served.groups.make = make
        served.groups.made[0].fail()
        for result in await asyncio.gather(*reading, return_exceptions=True):
            assert type(result) is type(expected) and expected.message in str(result)
        assert (len(served.groups.made) == 2) == ("no room" not in expected.message)
        assert not served.service.live() and served.service.readiness().phase == "failed"
        with pytest.raises(LlamaError, match=expected.message):
            served.ask([1, 5])


@pytest.mark.parametrize("num_blocks", [40, 90])
async def test_new_ranks_may_have_another_number_of_cache_blocks(num_blocks: int) -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
        reading = [asyncio.create_task(read(served.ask(prompt))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)
        served.groups.make = lambda: starting(num_blocks=num_blocks)
        served.groups.made[0].fail()
        assert await asyncio.gather(*reading) == [continuation(prompt, 30, steady) for prompt in prompts(12)]
        assert served.service.describe().blocks_total == num_blocks


@pytest.mark.parametrize("end", ["cancel", "deadline", "stop"])
async def test_requests_may_end_during_a_recovery_which_is_no_sign_of_a_dead_replica(end: str) -> None:
    async with RecoveringService(lambda: Group(steady), step_timeout_s=0.01) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        served.groups.make = lambda: gated(Group(steady), asyncio.Event())
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        await asyncio.sleep(50)
        assert served.service.live()
        if end == "stop":
            await served.service.stop()
        elif end == "cancel":
            stream.cancel()
        else:
            stream.end(DeadlineExceeded("late"))
        with pytest.raises(LlamaError):
            await read(stream)
        assert not served.service.describe().blocks_used
        async with asyncio.timeout(1):
            await served.service.drain()  # no live request is left
