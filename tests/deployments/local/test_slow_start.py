"""Ray's own start on a machine that is too busy for the time that Ray gives it."""

from typing import Any

import pytest
import ray

from deployments.local import small_cluster


@pytest.mark.parametrize(
    ("failures", "num_tries"),
    [
        ([], 1),
        (["The current node timed out during startup."], 2),
        (["The current node timed out during startup.", "The current node timed out during startup."], 2),
        (["no room on the disk"], 1),
    ],
)
def test_ray_is_started_once_more_where_it_has_timed_out(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], num_tries: int
) -> None:
    tries: list[Any] = []

    def init(**options: Any) -> None:
        tries.append(options)
        if len(tries) <= len(failures):
            raise Exception(failures[len(tries) - 1])

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(small_cluster, "SETTINGS", {})
    lines: list[str] = []
    if len(failures) == num_tries:
        with pytest.raises(Exception, match=failures[-1]):
            small_cluster.start("serve", lines.append)
    else:
        small_cluster.start("serve", lines.append)
    assert len(tries) == num_tries and all(options == tries[0] for options in tries)
    assert any("once more" in line for line in lines) == (num_tries > 1)
