"""The workers' lines that the terminal shows."""

import pytest

from deployments.local.worker_lines import line_to_show

TIME = "2026-01-31 12:00:07,123"
SERVE, CONTROLLER = f"{TIME} llama_LlamaIngress hh70cf0w -- ", f"{TIME} controller 42 -- "
JSON = '{"time": "2026-01-31T12:00:07.123Z", "level": "WARNING", "message": "recovered", "rank": 1}'
OUTCOME = '{"time": "2026-01-31T12:00:07.123Z", "level": "WARNING", "message": "request", "outcome": "ok"}'
REPLICA = "ServeReplica:llama:LlamaIngress"


@pytest.mark.parametrize(
    ("actor", "line", "shown"),
    [
        (REPLICA, f"WARNING {SERVE}recovered", "WARNING replica: recovered"),
        (REPLICA, f'WARNING {SERVE}request {{"outcome": "ok"}}', None),
        (REPLICA, f"ERROR {SERVE}request {{}}", "ERROR replica: request {}"),
        (REPLICA, f"WARNING {SERVE.removesuffix('-- ')}5f3c9a -- a client left", "WARNING replica: a client left"),
        (REPLICA, JSON, "WARNING replica: recovered"),
        (REPLICA, OUTCOME, None),
        (REPLICA, f"INFO {SERVE}ready after 2.3 s", None),
        (REPLICA, "Traceback (most recent call last):", None),
        ("RankWorker", JSON, "WARNING rank 1: recovered"),
        ("RankWorker", f"{TIME} INFO rank=0 epoch=0 cluster.rank.rank_process serving", None),
        ("RankWorker", f"{TIME} WARNING rank=0 epoch=0 llama_core.x torch", "WARNING rank 0: torch"),
        ("ServeController", f"WARNING {CONTROLLER}HTTPOptions.host='127.0.0.1' won't accept connections", None),
        (
            "ServeController",
            f"WARNING {CONTROLLER}Actor for Replica crashed.",
            "WARNING Serve: Actor for Replica crashed.",
        ),
        ("HAProxyManager", f"ERROR {TIME} proxy 127.0.0.1 -- x", None),
    ],
)
def test_the_terminal_shows_failures_and_recoveries_only(actor: str, line: str, shown: str | None) -> None:
    assert line_to_show(actor, line) == (shown and f"  12:00:07 {shown}")
