"""What the engine loop queues and refuses: checks of a request, the queue's limits, fairness among owners, draining."""

import asyncio
from types import SimpleNamespace

import pytest

from deployments.engine import retry_after
from deployments.engine.retry_after import SHORTEST_RETRY_S
from llama_core.errors import InvalidParameter, NotReady, QueueFull
from llama_core.scheduling.request import Request
from tests.support.fake_rank_group import FakeGroup
from tests.support.loop_engine import LoopEngine, greedy, read, running, submitted
from tests.support.requests import submit
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}


async def test_min_tokens_that_the_context_has_no_room_for_are_refused() -> None:
    async with running(FakeGroup()) as loop:
        for min_tokens, room in ((6, 5), (8, 7)):
            with pytest.raises(InvalidParameter, match=f"at most {room}") as refused:
                submit(loop, [1] * (100 - room), greedy(20, min_tokens=min_tokens))
            assert refused.value.param == "min_tokens"
        _, tokens, _ = await read(submit(loop, [1] * 95, greedy(20, min_tokens=5)))
        assert len(tokens) == 5


async def test_no_choice_is_queued_where_a_later_one_is_refused() -> None:
    async with running(FakeGroup()) as loop:
        with pytest.raises(InvalidParameter) as refused:
            submitted(loop, Request([[1] * 10, [1] * 95], [greedy(20, min_tokens=6)] * 2))
        assert refused.value.param == "min_tokens"
        assert (loop.num_live, loop.scheduler.num_waiting) == (0, 0)


async def test_retry_after_of_a_full_queue_is_the_time_until_half_of_it_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10_000.0
    monkeypatch.setattr(retry_after, "time", SimpleNamespace(monotonic=lambda: now))
    loop = LoopEngine(slots=2, step_tokens=16, max_seq_len=100)
    scheduler = loop.scheduler
    scheduler.admission.limit(100, 60)
    for _ in range(2):
        submit(loop, [1, 3], greedy(20))
    assert scheduler.schedule() is not None and scheduler.num_running == 2
    for _ in range(14):  # all of them wait, for two slots
        submit(loop, [1, 3, 4, 5], greedy(20))
    with pytest.raises(QueueFull, match="sequences of 56 tokens wait already, the limit is 60") as refused:
        submit(loop, [1, 3, 4, 5, 6], greedy(20))
    assert refused.value.retry_after_s == SHORTEST_RETRY_S, "nothing has ended yet"
    loop.loop._retry._ends.extend([now - 20, now - 15, now - 10, now - 5])
    with pytest.raises(QueueFull) as refused:
        submit(loop, [1, 3, 4, 5, 6], greedy(20))
    assert refused.value.retry_after_s == pytest.approx(14 / 2 / (4 / 20), rel=1e-6)
    submit(loop, [1, 3, 4], greedy(20))


async def test_a_newcomer_gets_the_place_of_a_flood_s_last_request_which_is_told_when_to_try_again() -> None:
    async with running(FakeGroup(token=lambda tokens: 5), slots=1, max_waiting=3) as loop:
        flood = [submit(loop, [1, 3], greedy(4), owner="flood") for _ in range(4)]
        loop.loop.check_capacity("new")
        newcomer = submit(loop, [1, 3], greedy(4), owner="new")
        with pytest.raises(QueueFull, match="given way") as refused:
            await read(flood[3])
        assert refused.value.retry_after_s >= SHORTEST_RETRY_S
        for stream in (newcomer, *flood[:3]):
            assert len((await read(stream))[1]) == 4
        assert loop.num_live == 0


async def test_a_loop_that_drains_refuses_new_requests_and_lets_the_live_ones_end() -> None:
    """Fronts submit to the loop, without the service."""
    async with running(FakeGroup(step_s=0.001, token=lambda tokens: 5)) as loop:
        stream = submit(loop, [1, 3], greedy(20))
        draining = asyncio.create_task(loop.loop.drain(60.0))
        await asyncio.sleep(0.005)
        with pytest.raises(NotReady):
            submit(loop, [1, 3], greedy())
        assert len((await read(stream))[1]) == 20 and await draining
