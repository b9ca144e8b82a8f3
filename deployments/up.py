"""`serve run CONFIG`, watched: says when it is ready, why it is not, and ends with an error if it never will be.

    python -m deployments.up serve_config.yaml

`serve run` itself submits the configuration and sleeps, whatever becomes of it. Here the same command runs in the main
thread, and a second one follows the deployment. HAProxy in front of the replicas is on unless RAY_SERVE_ENABLE_HA_PROXY=0.
"""

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from deployments.banner import banner, base_url

PENDING_NOTICE_S = 10.0


class Watch(threading.Thread):
    """Follows one application until it is ready or has failed; `failure` says why it ended."""

    def __init__(self, app_name: str, host: str, port: int) -> None:
        super().__init__(daemon=True, name="watch")
        self.app_name, self.host, self.port = app_name, host, port
        self.failure: str | None = None

    def run(self) -> None:
        begin, noticed = time.monotonic(), False
        while self.failure is None:
            time.sleep(0.25)
            phase, detail = self._readiness()
            if phase == "ready":
                print(banner(self._get("/props"), self.host, self.port), flush=True)
                return
            if phase == "failed":
                self.failure = detail
            elif phase is None:
                self.failure = self._deploy_failure()
                if not noticed and time.monotonic() - begin > PENDING_NOTICE_S and (reason := _pending()):
                    noticed = True
                    print(f"Waiting for room: {reason}", file=sys.stderr, flush=True)
        print(f"\nThe server cannot start: {self.failure}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGINT)  # `serve run` shuts everything down on Ctrl-C

    def _readiness(self) -> tuple[str | None, str]:
        """(phase, detail) as /ready says; phase None while nothing answers there."""
        try:
            answer = self._get("/ready")
        except (OSError, ValueError):
            return None, ""
        return answer.get("phase"), str(answer.get("detail", ""))

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(base_url(self.host, self.port) + path, timeout=2) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError(path)
        return answer

    def _deploy_failure(self) -> str | None:
        import ray
        from ray import serve

        if not ray.is_initialized():
            return None
        try:
            application = serve.status().applications.get(self.app_name)
        except Exception:  # Serve is only coming up
            return None
        if application is None or application.status not in ("DEPLOY_FAILED", "UNHEALTHY"):
            return None
        messages = [application.message, *(d.message for d in application.deployments.values())]
        return next((line for text in messages for line in reversed(text.splitlines()) if "Error" in line), messages[0])


def _pending() -> str | None:
    """What the placement groups that wait ask for, and what the cluster has."""
    import ray
    from ray.util import placement_group_table

    from cluster.placement import shortage

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for group in placement_group_table().values():
        if group["state"] == "PENDING":
            return shortage(list(group["bundles"].values()), nodes, group["strategy"]) or "all that it needs is in use"
    return None


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m deployments.up CONFIG.yaml")
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    os.environ["LLAMA_BANNER"] = "0"  # printed here, without a log line's prefix
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    http = config.get("http_options", {})

    from ray.serve.scripts import cli

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    watch = Watch(config["applications"][0]["name"], http.get("host", "0.0.0.0"), http.get("port", 8000))
    watch.start()
    try:
        cli(["run", sys.argv[1]], standalone_mode=False)
    except (SystemExit, KeyboardInterrupt):
        pass
    sys.exit(1 if watch.failure else 0)


if __name__ == "__main__":
    main()
