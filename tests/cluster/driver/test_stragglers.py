"""Who is slow, told from how long ranks compute and wait."""

from cluster.driver.stragglers import Pace, straggler
from cluster.rank.rank_worker import Phase, RankStatus


def status(rank: int, num_steps: int, step_s: float, waited_s: float | None, pid: int = 1) -> RankStatus:
    return RankStatus(rank, Phase.SERVING, 1, 1, pid, "node", num_steps, step_s, waited_s)


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    pace = Pace()
    assert pace.look([status(0, 10, 1.0, 0.9), status(1, 10, 1.0, 0.1)]) == {}, "nothing to compare with yet"
    own = pace.look([status(0, 20, 2.0, 1.7), status(1, 20, 2.0, 0.1)])
    assert {rank: round(ms) for rank, ms in own.items()} == {0: 20, 1: 100}
    assert straggler(own) == 1


def test_ranks_that_compute_alike_have_no_straggler_among_them() -> None:
    assert straggler({0: 10.0, 1: 15.0, 2: 11.0}) is None
    assert straggler({0: 0.1, 1: 0.5}) is None, "not worth mentioning"
    assert straggler({0: 10.0}) is None and straggler({}) is None


def test_what_is_not_known_is_left_out() -> None:
    pace = Pace()
    pace.look([status(0, 1, 1.0, 0.0), status(1, 1, 1.0, None), status(2, 1, 1.0, 0.0), None])
    look = pace.look([status(0, 1, 1.0, 0.0), status(1, 2, 2.0, None), status(2, 3, 2.0, 0.0, pid=7), None])
    assert look == {}, "no step since, no waiting known, another process, no answer"
