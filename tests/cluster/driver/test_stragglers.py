"""A rank is named as a straggler when it stays slow, never because of noise."""

import random

import pytest

from cluster.driver.stragglers import MIN_WINDOW_STEPS, SUSTAINED_WINDOWS, StepTimes, StepWindow, StragglerDetector
from cluster.wire.rank_status import Phase, RankStatus

WINDOWS_IN_35_MINUTES = 35 * 60 // 5


def status(rank: int, num_steps: int, step_s: float, waited_s: float | None, pid: int = 1) -> RankStatus:
    return RankStatus(rank, Phase.SERVING, 1, 1, pid, "node", num_steps, step_s, waited_s)


def window(*compute_ms: float, num_steps: int = 1000) -> StepWindow:
    return StepWindow(dict(enumerate(compute_ms)), num_steps)


def named(windows: list[StepWindow], detector: StragglerDetector | None = None) -> list[int]:
    detector = detector or StragglerDetector()
    return [rank for w in windows if (rank := detector.update(w)) is not None]


def test_the_compute_time_of_a_step_is_its_time_without_waiting() -> None:
    times = StepTimes()
    assert times.next_window([status(0, 10, 1.0, 0.9), status(1, 10, 1.0, 0.1)]) == StepWindow()
    found = times.next_window([status(0, 20, 2.0, 1.7), status(1, 30, 2.0, 0.1)])
    assert {rank: round(ms) for rank, ms in found.compute_ms.items()} == {0: 20, 1: 50}
    assert found.num_steps == 10


@pytest.mark.parametrize(
    "normal",
    [window(10.0, 15.0, 11.0), window(0.1, 0.9), window(10.0), StepWindow()],
    ids=["similar times", "an excess below the minimum", "one rank", "no times"],
)
def test_ranks_without_a_slow_one_have_no_straggler(normal: StepWindow) -> None:
    assert named([normal] * 50) == []


def test_noise_of_35_minutes_names_no_rank() -> None:
    """Each rank is disturbed in one window of twenty, up to tenfold, on top of 20 % jitter."""
    for seed in range(20):
        draw = random.Random(seed)

        def noisy(draw: random.Random = draw) -> float:
            return 3.0 * draw.lognormvariate(0.0, 0.2) * (draw.uniform(2, 10) if draw.random() < 0.05 else 1.0)

        windows = [window(noisy(), noisy()) for _ in range(WINDOWS_IN_35_MINUTES)]
        assert sum(max(times) > 2 * min(times) + 1 for w in windows if (times := w.compute_ms.values())) > 10
        assert named(windows) == []


@pytest.mark.parametrize(("slow_ms", "within"), [(15.0, 6), (6.2, SUSTAINED_WINDOWS)], ids=["five times", "twice"])
def test_a_sustained_straggler_is_named_once_and_again_after_it_has_recovered(slow_ms: float, within: int) -> None:
    detector, slow = StragglerDetector(), window(3.0, slow_ms)
    assert named([slow] * (within - 1), detector) == []
    assert named([slow], detector) == [1]
    assert named([slow] * 20, detector) == []
    assert named([window(3.0, 3.2)] * SUSTAINED_WINDOWS, detector) == []
    assert named([slow] * SUSTAINED_WINDOWS, detector) == [1]


def test_windows_with_few_steps_neither_count_nor_reset() -> None:
    detector = StragglerDetector()
    slow, idle = window(3.0, 15.0), window(3.0, 3.2, num_steps=MIN_WINDOW_STEPS - 1)
    assert named([idle, slow] * 6, detector) == [1]
    assert detector.update(window(3.0, 99.0, num_steps=1)) is None
