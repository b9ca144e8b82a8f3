"""Run by test_startup.py as a program: deploys checkpoints with faults by Serve, each as an application.

With arguments, only these cases. Prints its observations as one line of JSON.
"""

import json
import logging
import os
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.programs import free_port
from tests.support.checkpoints import WIDE, random_weights, split, write

LIMIT_S = 240.0
# Applications that are deployed together -> ranks; None: one for each shard, which `build_app` counts.
BATCHES: dict[str, dict[str, int | None]] = {
    "before any rank exists": {"missing": None, "params": 2, "tokenizer": 2, "truncated": 2},
    "one fault, two ranks": {"flipped": 2},
    "in a rank": {"pickle": 1, "names": 1},
    "NaN, two ranks": {"nan": 2},
}


class Malicious:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


def flip_a_bit(path: Path) -> None:
    """Flip the lowest bit of a weight in the middle of the file, which only the checksum can detect."""
    content = bytearray(path.read_bytes())
    content[len(content) // 8 * 4] ^= 1
    path.write_bytes(content)


def write_faulty(directory: Path) -> None:
    """Write checkpoints in two shards with one fault each."""
    weights = random_weights(WIDE)
    for name in [name for batch in BATCHES.values() for name in batch]:
        write(directory / name, split(weights, 2))
    (directory / "missing" / "consolidated.00.pth").unlink()
    (directory / "params" / "params.json").write_text(json.dumps(WIDE | {"dim": -64}))
    (directory / "tokenizer" / "params.json").write_text(json.dumps(WIDE | {"vocab_size": 700}))
    shard = directory / "truncated" / "consolidated.01.pth"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    flip_a_bit(directory / "flipped" / "consolidated.01.pth")
    torch.save({"norm.weight": Malicious(directory / "sprung")}, directory / "pickle" / "consolidated.00.pth")
    shards = split(weights, 2)
    for part in shards:
        part["layers.9.attention.wq.weight"] = part.pop("layers.0.attention.wq.weight")
    write(directory / "names", shards)
    weights["layers.1.feed_forward.w2.weight"][3, 5] = float("nan")
    write(directory / "nan", split(weights, 2))


def rank_processes() -> list[int]:
    """Rank actors that descend from this process."""
    parents: dict[int, int] = {}
    ranks = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            is_rank = (entry / "cmdline").read_bytes().startswith(b"ray::RankWorker")
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)] = int(fields[1])
        if is_rank and fields[0] != "Z":
            ranks.append(int(entry.name))

    def is_ours(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid != 0

    return [pid for pid in ranks if is_ours(pid)]


def status_of(url: str) -> int:
    """0 where nothing answers within 5 s."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def deploy(directory: Path, port: int, cases: dict[str, int | None]) -> dict[str, Any]:
    """Deploy one application for each case in place of the earlier ones, and follow them until they failed."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    # A replica that answers before its ranks have failed becomes UNHEALTHY instead of DEPLOY_FAILED.
    patient = {"answer_after_s": LIMIT_S}
    common = {"max_seq_len": 64, "max_batch_size": 4, "dtype": "float32", "device": "cpu"} | patient
    applications = [
        {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": "deployments.app:build_app",
            "args": common | {"ckpt_dir": str(directory / name)} | ({"model_parallel_size": n} if n else {}),
        }
        for name, n in cases.items()
    ]
    http = {"host": "127.0.0.1", "port": port}
    began = time.monotonic()
    controller = _get_global_client()
    assert controller is not None
    controller.deploy_apps(
        ServeDeploySchema.model_validate({"http_options": http, "applications": applications}), _blocking=False
    )
    urls = {name: f"http://127.0.0.1:{port}/{name}/ready" for name in cases}
    seen: dict[str, Any] = {}
    ready: set[int] = set()
    most_ranks, ended = [0], threading.Event()

    def watch_ranks() -> None:
        while not ended.wait(0.2):
            most_ranks.append(len(rank_processes()))

    watching = threading.Thread(target=watch_ranks)
    watching.start()
    while len(seen) < len(cases) and time.monotonic() - began < LIMIT_S:
        found = serve.status().applications
        for name in cases:
            ready.add(status_of(urls[name]))
            if name not in seen and name in found and found[name].status == "DEPLOY_FAILED":
                texts = [found[name].message, *(d.message for d in found[name].deployments.values())]
                seen[name] = {"seconds": round(time.monotonic() - began, 2), "message": "\n".join(texts)}
        time.sleep(0.2)
    ended.set()
    watching.join()
    gone_by = time.monotonic() + 60
    while (left := rank_processes()) and time.monotonic() < gone_by:
        time.sleep(0.1)
    # No further attempt may follow, so watch for as long as one would take to begin.
    ended_at = time.monotonic()
    while time.monotonic() - ended_at < 3:
        left += rank_processes()
        ready.update(status_of(url) for url in urls.values())
        time.sleep(0.3)
    states = {name: serve.status().applications[name].status for name in cases}
    return {"cases": seen, "ready": sorted(ready), "most_ranks": max(most_ranks), "ranks_left": left, "states": states}


def run(directory: Path, chosen: list[str]) -> dict[str, Any]:
    import ray  # only in the program: the test imports this module without Ray
    from ray import serve

    from tests.support.ray_nodes import few_processes

    # Ray keeps the address of the machine's cluster here, so no other program joins this cluster by accident.
    os.environ["RAY_TMPDIR"] = str(directory)
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    write_faulty(directory)
    port = free_port()
    # Each replica is tried once: test_startup.py also starts servers with Serve's default.
    os.environ["RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"] = "1"
    with few_processes():
        ray.init(
            address="local",
            num_cpus=8,
            namespace="serve",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        batches = {
            what: {name: count for name, count in cases.items() if not chosen or name in chosen}
            for what, cases in BATCHES.items()
        }
        seen = {what: deploy(directory, port, cases) for what, cases in batches.items() if cases}
        return {"batches": seen, "sprung": (directory / "sprung").exists()}
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        print("SEEN " + json.dumps(run(Path(temporary), sys.argv[1:])), file=sys.stdout)
