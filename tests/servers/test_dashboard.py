"""The dashboard, the alerts and the metrics beside real Prometheus tools and a real server.

Runs before `test_end_to_end.py`, which ends the server.
"""

import shutil
import subprocess
import urllib.request

import pytest

from tests.programs.dashboard import check
from tests.support.prometheus import MONITORING, is_installed
from tests.support.server import Server

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed, reason="needs Debian's prometheus"),
]


def test_every_query_of_the_dashboard_has_numbers(plain: Server) -> None:
    assert check(plain.url) == []


def test_promtool_finds_no_fault_in_a_servers_metrics(plain: Server) -> None:
    """But the names of Meta's reference, whose units it would have otherwise, and the aliases for one release."""
    with urllib.request.urlopen(plain.url + "/metrics", timeout=60) as answer:
        done = subprocess.run(["promtool", "check", "metrics"], input=answer.read(), capture_output=True)
    lines = (done.stdout + done.stderr).decode().splitlines()
    known = ("prefill_time_ms", "time_per_decoding_step_ms", "rank_step_ms")
    assert [line for line in lines if not line.startswith(known)] == []


def test_promtool_takes_the_alerts(tmp_path: object) -> None:
    assert shutil.which("promtool") is not None
    subprocess.run(["promtool", "check", "rules", str(MONITORING / "alerts.yml")], check=True, capture_output=True)
