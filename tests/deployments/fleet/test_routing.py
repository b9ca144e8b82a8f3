"""The order in which a front asks engines, from facts alone."""

from collections import Counter
from dataclasses import dataclass

import pytest

from deployments.fleet import routing


@dataclass(frozen=True)
class Engine:
    engine_id: str
    is_ready: bool = True


A, B, C = Engine("a"), Engine("b"), Engine("c")


@pytest.mark.parametrize(
    ("costs", "order"),
    [
        ({}, []),
        ({A: 5.0}, [A]),
        ({A: 500.0, B: 100.0, C: 300.0}, [B, C, A]),
        ({A: 100.0 + routing.TIE, B: 100.0}, [B, A]),
        ({Engine("d", is_ready=False): 0.0, B: 900.0}, [B, Engine("d", is_ready=False)]),
    ],
)
def test_the_cheapest_ready_engine_comes_first(costs: dict[Engine, float], order: list[Engine]) -> None:
    assert routing.by_cost(costs, b"a prompt") == order


def test_prompts_spread_over_engines_of_equal_costs_and_all_fronts_agree() -> None:
    costs, other_front = {A: 10.0, B: 10.0, C: 10.0 + routing.TIE / 2}, {C: 10.0, B: 10.0, A: 10.0}
    prompts = [number.to_bytes(8, "big") for number in range(300)]
    firsts = [routing.by_cost(costs, prompt)[0] for prompt in prompts]
    assert min(Counter(firsts).values()) > 60
    assert firsts == [routing.by_cost(other_front, prompt)[0] for prompt in prompts]


def test_an_engine_that_leaves_moves_only_its_own_prompts() -> None:
    prompts = [number.to_bytes(8, "big") for number in range(100)]
    for prompt in prompts:
        first, *rest = routing.by_cost({A: 1.0, B: 1.0, C: 1.0}, prompt)
        assert routing.by_cost(dict.fromkeys(rest, 1.0), prompt) == rest
        assert first not in rest
