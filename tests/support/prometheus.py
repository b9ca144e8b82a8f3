"""A real Prometheus that scrapes one server, and the queries of the dashboard."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.programs import free_port
from tests.support.programs import REPOSITORY
from tests.support.waiting import wait_until

MONITORING = REPOSITORY / "examples" / "monitoring"
SCRAPE_S = 1
is_installed = shutil.which("prometheus") is not None


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises urllib.error.HTTPError if the expression has an error."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=60) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
            return found

    def rules(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=60) as answer:
            return [rule for group in json.loads(answer.read())["data"]["groups"] for rule in group["rules"]]


@contextlib.contextmanager
def scraping(server_url: str) -> Iterator[Prometheus]:
    """With the project's configuration and alerts, but another target and a shorter interval."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [server_url.removeprefix("http://")]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(MONITORING / "alerts.yml", folder)
        arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )
        try:
            started = Prometheus(f"http://127.0.0.1:{port}")
            wait_until("Prometheus scrapes the server", lambda: _scrapes(started), pause_s=0.2)
            yield started
        finally:
            process.terminate()
            process.wait(30)


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """The title of each panel, and each of its queries with values for the dashboard's variables."""
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    values = {"${prefix}": "llama_", "$model": ".+", "$__rate_interval": "30s", "$__range": "30s"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in values.items():
                expression = expression.replace(variable, value)
            yield panel["title"], expression


def _scrapes(prometheus: Prometheus) -> bool:
    try:
        return any(series["value"][1] == "1" for series in prometheus.query("up"))
    except OSError:
        return False
