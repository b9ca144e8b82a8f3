"""A rank is named as a straggler when it is slow for long, never because of noise."""

import random

from cluster.driver.stragglers import (
    MIN_WINDOW_STEPS,
    SUSTAINED_WINDOWS,
    StepTimes,
    StepWindow,
    StragglerDetector,
    slowest,
)
from cluster.wire.rank_status import Phase, RankStatus

WINDOWS_IN_35_MINUTES = 35 * 60 // 5


def status(rank: int, num_steps: int, step_s: float, waited_s: float | None, pid: int = 1) -> RankStatus:
    return RankStatus(rank, Phase.SERVING, 1, 1, pid, "node", num_steps, step_s, waited_s)


def window(*compute_ms: float, num_steps: int = 1000) -> StepWindow:
    return StepWindow(dict(enumerate(compute_ms)), num_steps)


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    times = StepTimes()
    assert times.next_window([status(0, 10, 1.0, 0.9), status(1, 10, 1.0, 0.1)]) == StepWindow()
    found = times.next_window([status(0, 20, 2.0, 1.7), status(1, 30, 2.0, 0.1)])
    assert {rank: round(ms) for rank, ms in found.compute_ms.items()} == {0: 20, 1: 50}
    assert found.num_steps == 10
    assert slowest(found.compute_ms) == 1


def test_ranks_with_similar_times_have_no_straggler() -> None:
    assert slowest({0: 10.0, 1: 15.0, 2: 11.0}) is None
    assert slowest({0: 0.1, 1: 0.9}) is None, "the excess is below the minimum"
    assert slowest({0: 10.0}) is None and slowest({}) is None


def test_ranks_with_unknown_times_are_left_out() -> None:
    times = StepTimes()
    times.next_window([status(0, 1, 1.0, 0.0), status(1, 1, 1.0, None), status(2, 1, 1.0, 0.0), None])
    found = times.next_window([status(0, 1, 1.0, 0.0), status(1, 2, 2.0, None), status(2, 3, 2.0, 0.0, pid=7), None])
    assert found == StepWindow(), "no step since, no waiting time, another process, no answer"


def test_noise_of_35_minutes_names_no_rank() -> None:
    """Each rank is disturbed in one window of twenty, up to tenfold, on top of 20 % jitter."""
    for seed in range(20):
        draw, detector = random.Random(seed), StragglerDetector()

        def noisy(draw: random.Random = draw) -> float:
            return 3.0 * draw.lognormvariate(0.0, 0.2) * (draw.uniform(2, 10) if draw.random() < 0.05 else 1.0)

        windows = [window(noisy(), noisy()) for _ in range(WINDOWS_IN_35_MINUTES)]
        assert sum(slowest(w.compute_ms) is not None for w in windows) > 10, (
            "the trace would alarm a single-window rule"
        )
        assert [found for w in windows if (found := detector.update(w)) is not None] == []


def test_a_sustained_straggler_is_named_once_and_again_after_it_has_recovered() -> None:
    detector = StragglerDetector()
    slow, normal = window(3.0, 15.0), window(3.0, 3.2)
    assert [detector.update(w) for w in [slow] * 8] == [None] * (SUSTAINED_WINDOWS - 1) + [1] + [None] * 4
    assert [detector.update(w) for w in [normal] * 2 + [slow] * SUSTAINED_WINDOWS][-1] == 1


def test_windows_with_few_steps_neither_count_nor_reset() -> None:
    detector = StragglerDetector()
    slow, idle = window(3.0, 15.0), window(3.0, 3.2, num_steps=MIN_WINDOW_STEPS - 1)
    found = [detector.update(w) for w in [idle, slow] * SUSTAINED_WINDOWS]
    assert found == [None] * (2 * SUSTAINED_WINDOWS - 1) + [1]
    assert detector.update(window(3.0, 99.0, num_steps=1)) is None
