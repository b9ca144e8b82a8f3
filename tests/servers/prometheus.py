"""A real Prometheus that scrapes one server, and checks of the dashboard's queries."""

import contextlib
import json
import math
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.harness.programs import free_port
from tests.support.programs import REPOSITORY
from tests.support.waiting import wait_until

MONITORING = REPOSITORY / "examples" / "monitoring"
SCRAPE_S = 1
LOAD_S = 30.0  # at most
PAUSE_S = 1.0  # between two looks at all queries
is_installed = shutil.which("prometheus") is not None


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises httpx.HTTPStatusError if the expression has an error."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=params, timeout=60, trust_env=False)
        return answer.raise_for_status().json()["data"]


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
    except httpx.TransportError:
        return False


def load(url: str, stopping: threading.Event) -> None:
    """Requests that end, that are refused and whose clients leave."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while not stopping.is_set():
            body = {"prompt": "once upon a time " * 8, "max_tokens": 40}
            client.post("/v1/completions", json=body).raise_for_status()
            client.post("/v1/completions", json={"prompt": "x", "max_tokens": 10**6})
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                next(answer.iter_bytes())


def faults(prometheus: Prometheus) -> list[str]:
    """Of the dashboard's queries, each with its panel."""
    found = []
    for panel, expression in dashboard_queries():
        try:
            series = prometheus.query(expression)
        except httpx.HTTPStatusError as error:
            found.append(f"{panel}: {error.response.text[:300]}: {expression}")
            continue
        values = [float(each["value"][1]) for each in series]
        if not any(math.isfinite(value) for value in values):
            found.append(f"{panel}: no number: {expression}")
    return found


def check(url: str) -> list[str]:
    """Loads the server at `url` while Prometheus scrapes it, until every query has a number. Returns what is wrong by then."""
    stopping, deadline = threading.Event(), time.monotonic() + LOAD_S
    with scraping(url) as prometheus, ThreadPoolExecutor(4) as pool:
        loading = [pool.submit(load, url, stopping) for _ in range(4)]
        try:
            while (found := faults(prometheus)) and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
        finally:
            stopping.set()
        for each in loading:
            each.result()
        wait_until("the rules are evaluated", lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()))
        broken = [rule["name"] for rule in prometheus.rules() if rule["health"] == "err"]
        return [f"alert {name} has an error" for name in broken] + found
