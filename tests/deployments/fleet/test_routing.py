"""The order in which a front asks engines, from facts alone."""

from collections import Counter
from dataclasses import replace
from typing import Final, get_args

import pytest

from deployments.args import IngressArgs
from deployments.fleet.routing import (
    POLICIES,
    TIE_MS,
    Facts,
    Policy,
    Prompt,
    by_time,
    least_loaded,
    longest_prefix,
    power_of_two,
    round_robin,
)
from llama_core.scheduling.step_costs import CostModel

COSTS: Final = CostModel(base_ms=10.0, row_ms=1.0, token_ms=1.0, adapter_ms=300.0, output_tokens=100.0)
PROMPT: Final = Prompt(b"a prompt")
NEW: Final = 100  # tokens of the prompt
IDLE: Final = Facts("idle", True, 0, 0, slots=4, queued_tokens=0, num_new=NEW, step_tokens=512, costs=COSTS)
BUSY: Final = IDLE._replace(engine="busy", running=2)
READS: Final = IDLE._replace(engine="reads", running=1, queued_tokens=1000)  # a prompt
FULL: Final = IDLE._replace(engine="full", running=4)  # a slot comes free after about (10 + 4) * 100 / 4 ms
LOADING: Final = IDLE._replace(engine="loading", is_ready=False)
KNOWS: Final = READS._replace(engine="knows", num_new=1, num_known=1200)
SLOW: Final = IDLE._replace(engine="slow", costs=replace(COSTS, token_ms=20.0))
CRAMPED: Final = BUSY._replace(engine="cramped", num_blocks=20, free_blocks=0)
LOADS: Final = IDLE._replace(engine="loads", loads_adapter=True)


@pytest.mark.parametrize(
    ("policy", "engines", "order"),
    [
        (by_time, [], []),
        (by_time, [FULL], [FULL]),
        (by_time, [READS, FULL, IDLE], [IDLE, FULL, READS]),
        (by_time, [LOADING, FULL], [FULL, LOADING]),
        (by_time, [SLOW, FULL], [FULL, SLOW]),  # a prompt takes 2 s there
        (by_time, [CRAMPED, BUSY], [BUSY, CRAMPED]),
        (by_time, [LOADS, READS, BUSY], [BUSY, READS, LOADS]),  # all rows wait while an adapter is loaded
        # 1,300 tokens, read for the first time, delay others by as much as they take.
        (by_time, [KNOWS._replace(num_new=1), IDLE._replace(num_new=1300)], [KNOWS, IDLE._replace(num_new=1300)]),
        (by_time, [IDLE, KNOWS], [IDLE, KNOWS]),
        (least_loaded, [FULL, KNOWS, BUSY, IDLE], [IDLE, KNOWS, BUSY, FULL]),
        (least_loaded, [LOADING, FULL], [FULL, LOADING]),
        (longest_prefix, [IDLE, KNOWS], [KNOWS, IDLE]),
        (longest_prefix, [LOADING, FULL], [FULL, LOADING]),
        (power_of_two, [LOADING, FULL], [FULL, LOADING]),
        (power_of_two, [FULL, IDLE], [IDLE, FULL]),
        (round_robin, [FULL, IDLE, LOADING], [FULL, IDLE, LOADING]),
    ],
)
def test_the_order_of_engines(policy: Policy, engines: list[Facts], order: list[Facts]) -> None:
    assert policy(engines, PROMPT) == policy(engines[::-1], PROMPT) == order


@pytest.mark.parametrize("policy", POLICIES.values())
def test_every_policy_asks_every_engine(policy: Policy) -> None:
    engines = [each._replace(engine=f"{number}") for number, each in enumerate((IDLE, BUSY, READS, FULL, LOADING))]
    for number in range(7):
        ordered = policy(engines, Prompt(b"%d" % number, number))
        assert {each.engine for each in ordered} == set("01234")
        assert ordered[-1].engine == "4"  # it is not ready
    assert policy([], PROMPT) == []


def test_equal_costs_spread_prompts_and_every_front_chooses_the_same_engine_for_one() -> None:
    engines = [
        IDLE._replace(engine=name, queued_tokens=int(tokens))
        for name, tokens in zip("abc", (0, 0, TIE_MS), strict=True)
    ]
    prompts = [Prompt(str(number).encode()) for number in range(300)]
    firsts = [by_time(engines, prompt)[0].engine for prompt in prompts]
    assert min(Counter(firsts)[name] for name in "abc") > 60
    assert firsts == [by_time(engines[::-1], prompt)[0].engine for prompt in prompts]


def test_idle_engines_whose_measured_costs_differ_a_little_share_prompts() -> None:
    engines = [
        IDLE._replace(engine=name, costs=replace(COSTS, token_ms=token_ms))
        for name, token_ms in (("a", 1.0), ("b", 1.1))
    ]
    firsts = Counter(by_time(engines, Prompt(b"%d" % number))[0].engine for number in range(100))
    assert min(firsts["a"], firsts["b"]) > 25


def test_a_prompt_whose_first_engine_is_gone_goes_to_its_second_one() -> None:
    engines = [IDLE._replace(engine=name) for name in "abc"]
    for name in (b"1", b"2", b"3", b"4"):
        _, *rest = by_time(engines, Prompt(name))
        assert by_time(rest, Prompt(name)) == rest


def test_round_robin_takes_each_engine_in_turn() -> None:
    engines = [IDLE._replace(engine=name) for name in "abc"]
    assert [round_robin(engines, Prompt(b"", number))[0].engine for number in range(5)] == list("abcab")


def test_power_of_two_leaves_out_the_most_loaded_of_three() -> None:
    engines = [IDLE._replace(engine=str(running), running=running) for running in range(3)]
    firsts = Counter(power_of_two(engines, Prompt(b"", number))[0].engine for number in range(300))
    assert firsts["0"] > 170 and firsts["1"] > 70 and not firsts["2"]


def test_the_configuration_names_a_policy() -> None:
    assert get_args(IngressArgs.model_fields["routing"].annotation) == tuple(POLICIES)
