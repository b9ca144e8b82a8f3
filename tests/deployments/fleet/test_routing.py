"""The order in which a front asks engines, from facts alone."""

from collections import Counter
from dataclasses import replace
from typing import Final, get_args

import pytest

from deployments.args import IngressArgs
from deployments.fleet.routing import POLICIES, TIE, Facts, Policy, by_cost, by_load

STEP: Final = 100  # tokens
IDLE = Facts("idle", True, 0.0, STEP)
BUSY = Facts("busy", True, 1.5, STEP)
FULL = Facts("full", True, 4.0, STEP)
LOADING = replace(IDLE, engine="loading", is_ready=False)
KNOWS = replace(BUSY, engine="knows", num_known=200)  # which is worth two batches
LITTLE = replace(BUSY, engine="little", num_known=TIE - 1)


@pytest.mark.parametrize(
    ("policy", "engines", "order"),
    [
        (by_cost, [], []),
        (by_cost, [FULL], [FULL]),
        (by_cost, [BUSY, FULL, IDLE], [IDLE, BUSY, FULL]),
        (by_cost, [LOADING, FULL], [FULL, LOADING]),
        (by_cost, [IDLE, FULL, KNOWS], [KNOWS, IDLE, FULL]),
        (by_cost, [IDLE, LITTLE], [IDLE, LITTLE]),
        (by_load, [FULL, KNOWS, IDLE], [IDLE, KNOWS, FULL]),
        (by_load, [LOADING, FULL], [FULL, LOADING]),
    ],
)
def test_the_order_of_engines(policy: Policy, engines: list[Facts], order: list[Facts]) -> None:
    assert policy(engines, b"a prompt") == policy(engines[::-1], b"a prompt") == order


def test_equal_costs_spread_prompts_and_every_front_chooses_the_same_engine_for_one() -> None:
    engines = [replace(IDLE, engine=name, num_known=known) for name, known in (("a", 0), ("b", 0), ("c", TIE // 2))]
    prompts = [str(number).encode() for number in range(300)]
    firsts = [by_cost(engines, prompt)[0].engine for prompt in prompts]
    assert min(Counter(firsts)[name] for name in "abc") > 60
    assert firsts == [by_cost(engines[::-1], prompt)[0].engine for prompt in prompts]


def test_a_prompt_whose_first_engine_is_gone_goes_to_its_second_one() -> None:
    engines = [replace(IDLE, engine=name) for name in "abc"]
    for prompt in (b"1", b"2", b"3", b"4"):
        _, *rest = by_cost(engines, prompt)
        assert by_cost(rest, prompt) == rest


def test_the_configuration_names_a_policy() -> None:
    assert get_args(IngressArgs.model_fields["routing"].annotation) == tuple(POLICIES)
