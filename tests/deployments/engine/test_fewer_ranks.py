"""A service goes on with fewer ranks where a node is lost, and with all of them once there is room."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.engine import supervisor
from deployments.engine.recovery_plan import SAME_BUNDLE_ATTEMPTS
from llama_core.errors import CheckpointChanged, CheckpointError, ConfigError, LlamaError, NotReady, RankFailure
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.recovering_service import Group, RecoveringService, prompts, read, steady


def with_two_ranks(**changes: Any) -> RecoveringService:
    return RecoveringService(lambda: Group(steady), **{"model_parallel_size": 2, "shrink_after_s": 0.05} | changes)


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
        with pytest.raises(NotReady, match="contents"):
            served.ask([1, 5])
        assert served.groups.bundles_opened == [[1, 2], [1], [1, 2], [1]]


def too_small(served: RecoveringService) -> Callable[[], FakeGroup]:
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
    async with RecoveringService(
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
