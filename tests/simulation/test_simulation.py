"""A few histories of a simulated fleet, and that a seed replays exactly. `python -m tests.simulation` runs more."""

import random

import pytest

from tests.simulation.branches import Branches
from tests.simulation.history import drawn
from tests.simulation.running import finding
from tests.support.full_runs import examples

NUM_SEEDS = examples(10, 100)


@pytest.mark.parametrize("seed", range(1, NUM_SEEDS + 1))
def test_every_answer_of_a_history_is_whole_and_right(seed: int) -> None:
    found, _ = finding(*drawn(seed))
    assert not found, f"python -m tests.simulation --start {seed} --seeds 1: {found}"


def test_every_answer_of_histories_that_nobody_has_seen_is_whole_and_right() -> None:
    for _ in range(NUM_SEEDS):
        test_every_answer_of_a_history_is_whole_and_right(random.randrange(1_000_000))


def test_the_branches_that_a_history_takes_are_not_listed() -> None:
    with Branches() as branches:
        finding(*drawn(5))
    assert 0 < len([*branches.untaken()]) < len([*Branches().untaken()])


def test_a_seed_replays_exactly() -> None:
    assert finding(*drawn(5)) == finding(*drawn(5)) != finding(*drawn(6))
