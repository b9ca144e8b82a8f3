"""The dashboard beside a real Prometheus and a real server: `python -m tests.programs.dashboard`.

Serves a small model, lets Prometheus scrape it while requests run, and runs every query of the Grafana dashboard. Exit status 1
if a query has an error or no number. Needs Debian's `prometheus`.
"""

import math
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.prometheus import Prometheus, dashboard_queries, scraping
from tests.support.server import served
from tests.support.waiting import wait_until

LOAD_S = 30.0  # at most
PAUSE_S = 1.0  # between two looks at all queries


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
        except urllib.error.HTTPError as error:
            found.append(f"{panel}: {error.read().decode()[:300]}: {expression}")
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
