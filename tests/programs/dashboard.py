"""The dashboard beside a real Prometheus and a real server: `python -m tests.programs.dashboard`.

Serves a small model, lets Prometheus scrape it while requests run, and runs every query of the Grafana dashboard. Exit status 1
if a query has an error or no number. Needs Debian's `prometheus`.
"""

import math
import sys
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.prometheus import Prometheus, dashboard_queries, scraping
from tests.support.server import served

LOAD_S = 12.0


def load(url: str, seconds: float) -> None:
    """Requests that end, that are refused and whose clients leave."""
    deadline = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while time.monotonic() < deadline:
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
        except urllib.error.HTTPError as error:
            found.append(f"{panel}: {error.read().decode()[:300]}: {expression}")
            continue
        values = [float(each["value"][1]) for each in series]
        if not any(math.isfinite(value) for value in values):
            found.append(f"{panel}: no number: {expression}")
    return found


def check(url: str) -> list[str]:
    """Loads the server at `url` while Prometheus scrapes it."""
    with scraping(url) as prometheus:
        with ThreadPoolExecutor(4) as pool:
            for loading in [pool.submit(load, url, LOAD_S) for _ in range(4)]:
                loading.result()
        broken = [rule["name"] for rule in prometheus.rules() if rule["health"] == "err"]
        return [f"alert {name} has an error" for name in broken] + faults(prometheus)


def main() -> None:
    with served() as server:
        server.wait_ready()
        found = check(server.url)
    for fault in found:
        print(fault)
    num_queries = len(list(dashboard_queries()))
    print(f"{num_queries} queries, {len(found)} faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
