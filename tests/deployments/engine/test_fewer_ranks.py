"""A service goes on with fewer ranks where a node is lost, and with all of them once there is room."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.engine import supervisor
from deployments.engine.recovery_plan import SAME_BUNDLE_ATTEMPTS
from llama_core.errors import CheckpointChanged, CheckpointError, ConfigError, LlamaError, NotReady, RankFailure
from tests.deployments.engine.test_recovery import starting
from tests.support.fake_rank_group import until
from tests.support.fake_ranks import continuation
from tests.support.recovering_service import Group, RecoveringService, prompts, read, steady
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}
TOO_SMALL = ConfigError("rank 0 needs 9 GB, 5 GB are free")


def with_two_ranks(**changes: Any) -> RecoveringService:
    return RecoveringService(lambda: Group(steady), **{"model_parallel_size": 2, "shrink_after_s": 0.05} | changes)


async def check_serves(served: RecoveringService) -> None:
    assert await read(served.ask([1, 5], 8)) == continuation([1, 5], 8, steady)


def fails_to_start(served: RecoveringService, error: LlamaError, when: Callable[[list[list[int]]], bool]) -> None:
    """when: by the bundles of all groups so far, of which the one that starts is the last."""
    served.groups.make = lambda: starting(error if when(served.groups.bundles_opened) else None)


async def test_fewer_ranks_serve_without_a_node_and_all_ranks_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ROOM_CHECK_S", 0.01)
    async with with_two_ranks(shrink_after_s=0.5) as served:
        reading = [asyncio.create_task(read(served.ask(prompt, 50))) for prompt in prompts(12)]
        await asyncio.sleep(0.01)
        room = [1]
        served.groups.room = lambda: room
        served.groups.made[0].fail()
        await until(lambda: "there is no room for rank 1" in served.service.readiness().detail)
        await until(lambda: len(served.groups.made) == 2 and served.service.readiness().ready)
        assert served.service.readiness().detail == "with 1 of 2 ranks, for lack of room"
        assert served.service.describe().world_size == 1
        room.append(2)
        await until(lambda: len(served.groups.made) >= 3)
        assert await asyncio.gather(*reading) == [continuation(prompt, 50, steady) for prompt in prompts(12)]
        assert served.groups.bundles_opened == [[1, 2], [1], [1, 2]]
        assert served.service.describe().world_size == 2 and len(served.failures) == 1, "growth is no failure"


async def test_a_failure_of_fewer_ranks_does_not_wait_for_the_others_again() -> None:
    async with with_two_ranks() as served:
        served.groups.room = lambda: [1]
        served.groups.made[0].fail()
        await check_serves(served)
        for room in ([1, 2], None):  # the other's node may be alive with a failed GPU; or nobody knows
            served.groups.room = lambda room=room: room
            epoch, num_groups = served.service.describe().epoch, len(served.groups.made)
            if room is None:
                await asyncio.sleep(3 * supervisor.ROOM_CHECK_S)
                assert len(served.groups.made) == num_groups, "serving ranks are not replaced"
            served.groups.made[-1].fail()
            await check_serves(served)
            assert served.groups.bundles_opened == [[1, 2]] + [[1]] * num_groups
            assert served.service.describe().epoch == epoch + 1, "the first attempt"


@pytest.mark.parametrize(
    ("error", "is_temporary"),
    [
        (CheckpointError("consolidated.01.pth: no such file"), True),
        (CheckpointChanged("consolidated.01.pth: other contents"), True),
        (CheckpointChanged("consolidated.00.pth: other contents"), False),
    ],
    ids=["without the files", "with other files", "replaced everywhere"],
)
async def test_a_node_that_joins_with_an_unusable_checkpoint_ends_streams_only_if_all_nodes_have_it(
    error: LlamaError, is_temporary: bool
) -> None:
    async with with_two_ranks() as served:
        fails_to_start(served, error, lambda opened: len(opened) == 3 or (len(opened) > 3 and not is_temporary))
        served.groups.room = lambda: [1] if len(served.groups.made) == 1 else [1, 2]
        served.groups.made[0].fail()
        await until(lambda: len(served.groups.made) >= 4)
        if is_temporary:
            await check_serves(served)
        else:
            await until(lambda: not served.service.live())
            with pytest.raises(NotReady, match="contents"):
                served.ask([1, 5])
        assert served.groups.bundles_opened[:4] == [[1, 2], [1], [1, 2], [1]]


@pytest.mark.parametrize(
    ("error", "fails", "num_looks", "opened"),
    [
        (TOO_SMALL, lambda opened: len(opened[-1]) == 1, 6, [[1, 2], [1], [1, 2]]),
        (ConfigError("5 GB are free"), lambda opened: len(opened) == 2, 0, [[1, 2]] * 3),
    ],
    ids=["fewer cannot hold them: they are tried once", "as many as before: free memory may be short for a while"],
)
async def test_live_requests_wait_for_ranks_that_can_hold_them(
    error: LlamaError, fails: Any, num_looks: int, opened: list[list[int]]
) -> None:
    """num_looks: until there is room for both ranks."""
    async with with_two_ranks() as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        fails_to_start(served, error, fails)
        looks: list[int] = []
        served.groups.room = lambda: looks.append(1) or ([1] if len(looks) < num_looks else [1, 2])  # type: ignore[func-returns-value]
        served.groups.made[0].fail()
        assert (await read(stream))[-5:] == continuation([1, 5], 20, steady)[-5:]
        assert served.groups.bundles_opened == opened


@pytest.mark.parametrize(
    ("min_ranks", "room", "message", "num_groups"),
    [
        (1, [1], r"1 of 2 ranks cannot serve: rank 0 needs 9 GB, 5 GB are free", 2),
        (2, [2], r"could not be brought back in 0\.3 s: there is no room for rank 0", 1),
    ],
    ids=["fewer cannot serve", "fewer may not serve"],
)
async def test_a_wait_for_more_ranks_ends_at_the_recovery_timeout_with_its_reason(
    min_ranks: int, room: list[int], message: str, num_groups: int
) -> None:
    async with with_two_ranks(recovery_timeout_s=0.3, min_ranks=min_ranks) as served:
        stream = served.ask([1, 5], 20)
        await anext(stream)
        fails_to_start(served, TOO_SMALL, lambda opened: len(opened[-1]) == 1)
        served.groups.room = lambda: room
        served.groups.made[0].fail()
        with pytest.raises(RankFailure, match=message):
            await read(stream)
        assert not served.service.live() and len(served.groups.made) == num_groups


async def test_all_ranks_that_have_room_go_on_serving() -> None:
    args: dict[str, Any] = {"ckpt_dir": "demo", "model_parallel_size": 4, "shrink_after_s": 0.0}
    async with RecoveringService(lambda: Group(steady), **args) as served:
        served.groups.room = lambda: [1, 3, 4]
        served.groups.made[0].fail()
        await check_serves(served)
        assert served.groups.bundles_opened == [[1, 2, 3, 4], [1, 3, 4]]


async def test_a_bundle_that_every_attempt_fails_in_is_left_out_for_long() -> None:
    async with with_two_ranks() as served:
        broken = RankFailure("rank 0 failed while loading: no such GPU", rank=0)
        fails_to_start(served, broken, lambda opened: len(opened[-1]) == 2)
        served.groups.made[0].fail()
        await check_serves(served)
        num_groups = len(served.groups.made)
        assert served.groups.bundles_opened[-1] == [2] and num_groups > SAME_BUNDLE_ATTEMPTS
        await asyncio.sleep(supervisor.LONGEST_ROOM_CHECK_S - 10)
        assert len(served.groups.made) == num_groups, "each attempt would interrupt the serving ranks"


async def test_the_first_tokens_of_fewer_ranks_count_as_theirs() -> None:
    """They may differ in bits: only engines with as many ranks may go on after them."""
    async with with_two_ranks(shrink_after_s=0.5) as served:
        stream = served.ask([1, 5], 50)
        await anext(stream)
        assert stream.numerics.startswith("2|")
        served.groups.room = lambda: [1]
        served.groups.made[0].fail()
        await until(lambda: len(served.groups.made) == 2)
        before = stream.sequence.length
        await until(lambda: stream.sequence.length > before)
        assert stream.numerics.startswith("1|")
