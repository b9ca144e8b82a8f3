"""A server that exports traces and writes its log as JSON, with its collector and its log files."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.otlp_collector import Collector, collecting
from tests.support.server import API_KEYS_VARIABLE, Server, served

_OF_RAY = (":actor_name:", ":job_id:", ":task_name:")  # marks that Ray writes into a worker's output


@dataclass(frozen=True)
class Traced:
    """A running server, its collector, and Ray's folder with all log files."""

    server: Server
    collector: Collector
    folder: Path

    def log_files(self) -> list[Path]:
        return [path for path in self.folder.glob("session_2*/logs/**/*") if path.is_file()]

    def replica_lines(self) -> list[dict[str, Any]]:
        """The lines of the replicas' log files; each must be JSON."""
        files = [path for path in self.log_files() if path.name.startswith("replica_")]
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def rank_lines(self) -> list[str]:
        """What the ranks have written to standard error."""
        files = [path for path in self.log_files() if path.name.startswith("worker-") and path.suffix == ".err"]
        texts = [text for path in files if ":actor_name:RankWorker" in (text := path.read_text(errors="replace"))]
        return [line for text in texts for line in text.splitlines() if line and not line.startswith(_OF_RAY)]

    def of_request(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.replica_lines() if line.get("request_id") == request_id]

    def with_text(self, text: str) -> list[Path]:
        """The log files that contain `text`."""
        return [path for path in self.log_files() if text.encode() in path.read_bytes()]


@contextmanager
def traced_server(api_keys: Sequence[str] = (), **args: Any) -> Iterator[Traced]:
    folder = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets need a short path
    try:
        with collecting() as collector:
            env = {
                "RAY_TMPDIR": folder,
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
                "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # a deployment that fails does so soon
            }
            if api_keys:
                env[API_KEYS_VARIABLE] = ",".join(api_keys)
                env["LLAMA_ADMIN_KEYS"] = api_keys[0]  # which reads the metrics
            with served(args={"log_format": "json"} | args, env=env) as server:
                server.wait_ready()
                yield Traced(server, collector, Path(folder) / "ray")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
