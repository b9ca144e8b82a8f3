"""Detection of curves that are worse than linear."""

from collections.abc import Callable

import pytest

from benchmarks.questions.growth import Growth, Line

ROWS = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def growth(curve: Callable[[float], float], noise: float = 0.01) -> Growth:
    return Growth.of([(x, curve(x)) for x in ROWS], noise, tolerance=1.2)


def test_a_line_is_fitted_to_its_points() -> None:
    line = Line.through([(0, 1), (1, 3), (2, 5)])
    assert (line.at_zero, line.slope) == pytest.approx((1, 2))


@pytest.mark.parametrize(
    "curve",
    [
        lambda x: 3 + 0.5 * x,
        lambda x: 7.0,
        lambda x: max(10.0, 0.5 * x),  # a knee in the lower half: weights are read once, then arithmetic counts
        lambda x: x**0.5,
        lambda x: 3 + 0.5 * x + (0.005 if x > 60 else 0),  # noise
    ],
)
def test_straight_lines_knees_and_flattening_curves_are_not_worse_than_linear(curve: Callable[[float], float]) -> None:
    assert not growth(curve).worse_than_linear


@pytest.mark.parametrize("curve", [lambda x: x * x, lambda x: 1 + 0.1 * x + 0.05 * x * x, lambda x: x**3])
def test_squares_and_cubes_are_worse_than_linear(curve: Callable[[float], float]) -> None:
    assert growth(curve).worse_than_linear
