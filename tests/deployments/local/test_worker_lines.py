"""The workers' lines that the terminal shows."""

import pytest

from deployments.local.worker_lines import line_to_show

SERVE = "2026-01-31 12:00:07,123 llama_LlamaIngress hh70cf0w -- "
CONTROLLER = "2026-01-31 12:00:07,123 controller 42 -- "


@pytest.mark.parametrize(
    ("actor", "line", "shown"),
    [
        (
            "ServeReplica:llama:LlamaIngress",
            f"WARNING {SERVE}recovered after 0.33 s, epoch 1",
            "  12:00:07 WARNING replica: recovered after 0.33 s, epoch 1",
        ),
        (
            "ServeReplica:llama:LlamaIngress",
            f"ERROR {SERVE}recovering 3 live requests: rank 1 died",
            "  12:00:07 ERROR replica: recovering 3 live requests: rank 1 died",
        ),
        ("ServeReplica:llama:LlamaIngress", f'WARNING {SERVE}request {{"outcome": "ok"}}', None),
        (
            "ServeReplica:llama:LlamaIngress",
            f'ERROR {SERVE}request {{"outcome": "internal_error"}}',
            '  12:00:07 ERROR replica: request {"outcome": "internal_error"}',
        ),
        (
            "ServeReplica:llama:LlamaIngress",
            f"WARNING {SERVE.removesuffix('-- ')}5f3c9a -- a client did not read its stream",
            "  12:00:07 WARNING replica: a client did not read its stream",
        ),
        (
            "ServeReplica:llama:LlamaIngress",
            '{"time": "2026-01-31T12:00:07.123Z", "level": "WARNING", "message": "recovered after 0.33 s, epoch 1"}',
            "  12:00:07 WARNING replica: recovered after 0.33 s, epoch 1",
        ),
        (
            "RankWorker",
            '{"time": "2026-01-31T12:00:07.123Z", "level": "ERROR", "message": "a step failed", "rank": 1}',
            "  12:00:07 ERROR rank 1: a step failed",
        ),
        (
            "ServeReplica:llama:LlamaIngress",
            '{"time": "2026-01-31T12:00:07.123Z", "level": "WARNING", "message": "request", "outcome": "ok"}',
            None,
        ),
        ("RankWorker", '{"level": "ERROR"}', None),
        ("ServeReplica:llama:LlamaIngress", f"WARNING {SERVE}Failed to bind. Retrying...", None),
        ("ServeReplica:llama:LlamaIngress", f"INFO {SERVE}ready after 2.3 s", None),
        ("ServeReplica:llama:LlamaIngress", "Traceback (most recent call last):", None),
        ("ServeController", f"INFO {CONTROLLER}Adding 1 replica", None),
        ("ServeController", f"WARNING {CONTROLLER}HTTPOptions.host='127.0.0.1' won't accept connections", None),
        (
            "ServeController",
            f"WARNING {CONTROLLER}Actor for Replica(id='x') crashed, marking it unhealthy immediately.",
            "  12:00:07 WARNING Serve: Actor for Replica(id='x') crashed, marking it unhealthy immediately.",
        ),
        ("HAProxyManager", "ERROR 2026-01-31 12:00:07,123 proxy 127.0.0.1 -- x", None),
        ("RankWorker", "2026-01-31 12:00:07,508 INFO rank=0 epoch=0 cluster.rank.rank_process serving", None),
        (
            "RankWorker",
            "2026-01-31 12:00:07,508 WARNING rank=0 epoch=0 llama_core.execution.runner rank 0 computes with torch",
            "  12:00:07 WARNING rank 0: rank 0 computes with torch",
        ),
    ],
)
def test_the_terminal_shows_failures_and_recoveries_only(actor: str, line: str, shown: str | None) -> None:
    assert line_to_show(actor, line) == shown
