"""Every step has a share for prompts that are much shorter than the oldest one; what they cost each other is bounded."""

from collections import deque
from itertools import count

import pytest

from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prompt_budget import TOKENS_A_PROMPT, TOKENS_ALONE
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput

LONG, SHORT = 12_000, 100  # tokens: of 9,000 words, and of a short request


class Served:
    """A scheduler whose ranks sample the same token always, with `depth` steps in flight. num_tokens: of each step made."""

    def __init__(self, depth: int = 1, slots: int = 8, num_blocks: int = 10_000) -> None:
        config = SchedulerConfig(slots, 2000, frozenset({2}), max_loras=1)
        self.scheduler = Scheduler(config, BlockPool(num_blocks, 16))
        self.scheduler.prompt_budget.limit(TOKENS_ALONE)
        self.depth = depth
        self.in_flight: deque[StepInput] = deque()
        self.num_tokens: list[int] = []
        self._first_token = count(1000, 1000)

    def add(
        self, length: int, owner: str = "", priority: int = 0, *, begin: list[int] | None = None, max_new: int = 1
    ) -> Sequence:
        """begin: the prompt's first tokens, which other prompts may share."""
        first = next(self._first_token)
        own = [first + i % 900 for i in range(length - len(begin or []))]
        params = SamplingParams(ignore_eos=True)
        seq = Sequence((begin or []) + own, params, length + max_new, terms=Terms(owner, priority))
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        """Fill the pipeline, and take the oldest step back."""
        while len(self.in_flight) < self.depth and (batch := self.scheduler.schedule()) is not None:
            self.in_flight.append(batch)
            self.num_tokens.append(batch.num_tokens)
        batch = self.in_flight.popleft()
        self.scheduler.commit(StepOutput(batch.epoch, batch.step, [5] * batch.num_samples))

    def until_first_token(self, seq: Sequence) -> list[int]:
        """The tokens of each step that ends from now on, up to that which samples the sequence's first token."""
        begin = len(self.num_tokens) - len(self.in_flight)
        steps = 0
        while not seq.output:
            self.step()
            steps += 1
        return self.num_tokens[begin : begin + steps]


def alone(length: int, num_decodes: int = 0) -> list[int]:
    served = Served()
    for _ in range(num_decodes):
        served.until_first_token(served.add(20, max_new=2000))
    return served.until_first_token(served.add(length))


@pytest.mark.parametrize("num_decodes", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_beside_a_long_one_has_its_first_token_after_at_most_three_steps(
    num_decodes: int, depth: int
) -> None:
    served = Served(depth)
    for _ in range(num_decodes):
        served.until_first_token(served.add(20, max_new=2000))
    long = served.add(LONG)
    begin = len(served.num_tokens)
    for _ in range(3):
        for _ in range(4):
            served.step()
        short = served.add(SHORT)
        steps = served.until_first_token(short)
        assert len(steps) <= 3
        if depth == 1:  # as where the engine loop holds the next step back for newcomers
            # A step was sent just before the prompt came.
            waited = max(served.num_tokens[:-1]) + sum(steps)
            assert waited <= 3 * (TOKENS_A_PROMPT + num_decodes) + 1.5 * SHORT
    steps = served.until_first_token(long)
    assert len(served.num_tokens) - len(served.in_flight) - begin <= 1.1 * len(alone(LONG, num_decodes))


@pytest.mark.parametrize("owner", ["", "another"])
def test_a_short_prompt_overtakes_long_ones_that_wait(owner: str) -> None:
    served = Served()
    longs = [served.add(LONG) for _ in range(4)]
    served.step()
    short = served.add(SHORT, owner)
    assert len(served.until_first_token(short)) <= 3
    assert [long.slot is not None for long in longs] == [True, False, False, False], "the others wait for their turn"


def test_the_shortest_prompt_comes_first() -> None:
    served = Served()
    served.add(LONG)
    served.step()
    middle, short = served.add(3000), served.add(SHORT)
    assert len(served.until_first_token(short)) <= 2
    assert not middle.output


def test_a_prefix_that_is_being_computed_is_computed_once() -> None:
    served = Served()
    prefix = [7 + i % 500 for i in range(4000)]
    served.add(LONG, begin=prefix)
    served.step()
    second = served.add(4000 + SHORT, begin=prefix)
    steps = served.until_first_token(second)
    assert second.num_cached == 4000
    assert sum(steps) <= 4000 + SHORT + TOKENS_ALONE


def test_a_short_rest_after_a_cached_prefix_overtakes() -> None:
    served = Served()
    prefix = [7 + i % 500 for i in range(8000)]
    served.until_first_token(served.add(8010, begin=prefix))
    served.add(LONG)
    served.step()
    second_turn = served.add(8000 + SHORT, begin=prefix)
    assert len(served.until_first_token(second_turn)) <= 2
