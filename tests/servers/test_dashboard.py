"""The dashboard, the alerts and the metrics beside real Prometheus tools and a real server.

Runs before `test_end_to_end.py`, which ends the server.
"""

import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers.prometheus import MONITORING, check, is_installed
from tests.support.server import Server

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed, reason="needs Debian's prometheus"),
]


def test_every_query_of_the_dashboard_has_numbers(plain: Server) -> None:
    assert check(plain.url) == []


def test_promtool_finds_no_fault_in_a_servers_metrics(plain: Server) -> None:
    """But the names of Meta's reference."""
    with urllib.request.urlopen(plain.url + "/metrics", timeout=60) as answer:
        done = subprocess.run(["promtool", "check", "metrics"], input=answer.read(), capture_output=True)
    lines = (done.stdout + done.stderr).decode().splitlines()
    known = ("prefill_time_ms", "time_per_decoding_step_ms", "cuda_oom_errors_count", "invalid_dialog_assertions_count")
    assert [line for line in lines if not line.startswith(known)] == []


@pytest.mark.parametrize("prefix", ["llama_", "ray_llama_"], ids=["of a replica", "of Ray"])
def test_the_alerts_fire_for_the_names_of_a_replica_and_of_ray(prefix: str, tmp_path: Path) -> None:
    at_20_minutes = {
        "LlamaRanksMissing": ("num_ranks", "0x40"),
        "LlamaRanksRestart": ("rank_restarts_total", "0+1x40"),
        "LlamaQueueGrows": ("num_requests_waiting", "20x40"),
        "LlamaRequestsRejected": ("requests_rejected_total{cause='queue_full'}", "0+60x40"),
        "LlamaFirstTokenSlow": ("time_to_first_token_seconds_bucket{le='+Inf'}", "0+60x40"),
        "LlamaCacheFull": ("num_preemptions_total", "0+120x40"),
    }
    series = [{"series": prefix + name, "values": values} for name, values in at_20_minutes.values()]
    series.append({"series": f"{prefix}time_to_first_token_seconds_bucket{{le='20'}}", "values": "0x40"})

    def names(metrics: list[dict[str, str]], *expected: str) -> dict[str, Any]:
        query: dict[str, Any] = {"expr": "group by (alertname) (ALERTS{alertstate='firing'})", "eval_time": "20m"}
        query["exp_samples"] = [{"labels": f"{{alertname='{name}'}}", "value": 1} for name in expected]
        return {"interval": "1m", "input_series": metrics, "promql_expr_test": [query]}

    rules: dict[str, Any] = {"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "1m"}
    rules["tests"] = [names(series, *at_20_minutes), names([], "LlamaMetricsMissing")]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(rules))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
