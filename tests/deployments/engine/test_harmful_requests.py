"""Requests that make the ranks fail are refused alone, and ranks that fail by themselves convict no request."""

import asyncio

import pytest

from llama_core.errors import LlamaError, PoisonRequest, RankFailure
from llama_core.scheduling.quarantine import (
    MAX_FAILURES_WITHOUT_PROGRESS,
    MAX_VERDICTS_WITHOUT_PROGRESS,
    SCORE_OF_A_DEATH,
    SCORE_OF_AN_ERROR,
)
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support.fake_rank_group import until
from tests.support.fake_ranks import continuation
from tests.support.recovering_service import Crash, Group, RecoveringService, prompts, read, steady
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}
POISON = 599


def harmful(raises: bool, at: int = 0) -> Group:
    """Ranks that fail at a request with POISON, at this number of tokens."""

    def token(tokens: list[int]) -> int:
        if tokens[1] == POISON and len(tokens) >= at:
            raise Crash
        return steady(tokens)

    return Group(token, raises=raises)


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "dies"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "among others"])
@pytest.mark.parametrize("at", [3, 20], ids=["in its prompt", "while it decodes"])
async def test_a_request_that_makes_the_ranks_fail_is_refused_alone(raises: bool, alone: bool, at: int) -> None:
    async with RecoveringService(lambda: harmful(raises, at)) as served:
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
    async with RecoveringService(lambda: harmful(True, 12)) as served:
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

    async with RecoveringService(lambda: Failing(steady)) as served:
        answers = await asyncio.gather(*(read(served.ask(prompt)) for prompt in prompts(6)))
        assert len(served.groups.made) == 10 and answers == [continuation(prompt, 30, steady) for prompt in prompts(6)]


async def test_groups_that_never_complete_a_step_fail_the_replica_and_convict_no_request() -> None:
    def broken(tokens: list[int]) -> int:
        raise Crash

    async with RecoveringService(lambda: Group(broken)) as served:
        results = await asyncio.gather(*(read(served.ask(prompt)) for prompt in prompts(20)), return_exceptions=True)
        assert all(isinstance(result, RankFailure) for result in results)
        assert not served.service.live() and "did not complete a step" in served.service.readiness().detail
        assert len(served.groups.made) == MAX_FAILURES_WITHOUT_PROGRESS + 2


async def test_too_many_verdicts_without_a_completed_step_fail_the_replica() -> None:
    def broken(tokens: list[int]) -> int:
        if tokens[:2] != [2, 2]:  # the canary request's prompt
            raise Crash
        return steady(tokens)

    async with RecoveringService(lambda: Group(broken)) as served:
        # One request after the other is refused, until the limit of verdicts.
        results = await asyncio.gather(*(read(served.ask(prompt)) for prompt in prompts(20)), return_exceptions=True)
        assert all(isinstance(result, LlamaError) for result in results)
        assert not served.service.live() and "no step completed" in served.service.readiness().detail
        num_verdicts = sum(isinstance(result, PoisonRequest) for result in results)
        assert num_verdicts == MAX_VERDICTS_WITHOUT_PROGRESS + 1 and len(served.groups.made) < 5 * num_verdicts


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "dies"])
async def test_a_harmful_request_that_is_cancelled_and_sent_again_convicts_no_other(raises: bool) -> None:
    async with RecoveringService(lambda: harmful(raises)) as served:
        neighbour = asyncio.create_task(read(served.ask([1, 5], 40)))
        for _ in range(8):
            num_groups = len(served.groups.made)
            poison = served.ask([1, POISON, 7])
            await until(lambda num=num_groups: len(served.groups.made) != num)  # type: ignore[misc]
            poison.cancel()
        assert await neighbour == continuation([1, 5], 40, steady)
