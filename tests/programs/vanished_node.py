"""A replica's node loses power under a whole answer and under two streams: when does HAProxy end the clients' connections?

    unshare -rn python -m tests.programs.vanished_node --seconds 120

Runs in a network namespace of its own, with the replica in another, whose link goes down without a FIN. Prints a line of JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
from ray.serve._private.haproxy import BackendConfig, ServerConfig

from tests.deployments.local.haproxy import STUB, running, started
from tests.support.scripted_engine import eventually

OURS, REPLICAS, PORT = "10.77.0.1", "10.77.0.2", 30_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3, help="of the whole answer")
    seconds = parser.parse_args().seconds
    shell("ip link set lo up")
    node = subprocess.Popen(["unshare", "-n", sys.executable, "-c", STUB, "0.0.0.0", str(PORT)])
    inside = f"nsenter -t {node.pid} -n"
    try:
        shell("ip link add ours type veth peer name theirs")
        eventually(lambda: Path(f"/proc/{node.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink())
        shell(f"ip link set theirs netns {node.pid} && ip addr add {OURS}/24 dev ours && ip link set ours up")
        shell(f"{inside} ip addr add {REPLICAS}/24 dev theirs && {inside} ip link set theirs up")
        with tempfile.TemporaryDirectory(prefix="haproxy-") as name:
            print(json.dumps(watch(Path(name), seconds, f"{inside} ip link set theirs down")))
    finally:
        node.kill()


def watch(folder: Path, seconds: int, cut: str) -> dict[str, object]:
    backend = BackendConfig("http-llama", "/", servers=[ServerConfig("SERVE_REPLICA-1", REPLICAS, PORT)])
    ends: dict[str, float] = {}

    def stream(client: httpx.Client, name: str, path: str) -> threading.Thread:
        def read() -> None:
            with suppress(httpx.TransportError), client.stream("GET", path) as answer:
                for _ in answer.iter_raw():
                    pass
            ends[name] = time.monotonic()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    with running(folder, backend) as (replaced, client):
        eventually(lambda: client.get("/").status_code == 200)
        client.timeout = httpx.Timeout(seconds + 300)
        whole = client.get(f"/whole?{seconds}")
        old = [stream(client, "replaced", "/whole?600")]
        time.sleep(1)
        with started(folder, "-sf", str(replaced.pid), "-x", f"{folder}/admin.sock"):
            time.sleep(2)
            with httpx.Client(base_url=client.base_url, timeout=300) as second:
                new = [stream(second, name, path) for name, path in (("stream", "/stream?600"), ("wait", "/whole?600"))]
                time.sleep(2)
                shell(cut)
                begin_s = time.monotonic()
                for thread in old + new:
                    thread.join(120)
    found = {f"{name}_s": round(end - begin_s, 1) for name, end in ends.items()}
    return {"whole": f"{whole.status_code} {whole.text}", **found}


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


if __name__ == "__main__":
    main()
