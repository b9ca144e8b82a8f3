"""The settings of `llama-ray up` that plain `serve run` can have too, and a warning about those that it lacks.

Ray's processes read Serve's variables when they start. `serve run deployments.app:build_app` builds the application before it
starts Ray, so all variables can be set then, for a cluster that this command starts. `serve run CONFIG` starts Ray first;
only the replica's own process can still get variables.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Final

from deployments.local import haproxy
from deployments.local.private_files import PARENT

SAFE_HEADERS: Final = "deployments.serve_headers.middlewares"
# One event loop for HTTP and the engine. With Serve's own thread for the replica's code, every token would change threads.
ONE_LOOP: Final = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# One pass of the controller's loop holds a core for 1.5 ms, which all ranks on its machine wait for. Serve's default is 0.1.
FEW_PASSES: Final = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5"}
# By default Serve kills a proxy, and warns, that is not ready after 5 s or answers late, as on a machine whose cores are busy.
PATIENT: Final = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}


def cluster_variables(directory: Path) -> dict[str, str]:
    """Variables for every process of the cluster. All files of HAProxy go into `directory`."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",  # Ray would send a usage report to its makers
        **ONE_LOOP,
        **FEW_PASSES,
        **PATIENT,
        # Serve reads some of the clients' headers before the replica does, and answers invalid ones by itself.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": SAFE_HEADERS,
        **haproxy.settings(directory),
    }


def replica_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a replica's process, which would not inherit them."""
    return {name: value for name, value in ONE_LOOP.items() if name not in environment}


def builds_before_ray_starts(arguments: Sequence[str] | None = None) -> bool:
    """Whether this process is `serve run` with an import path, which starts Ray after the application is built."""
    words = sys.argv if arguments is None else arguments
    return Path(words[0]).name == "serve" and "run" in words[1:]


def set_cluster_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that are not set yet. HAProxy's files are removed when this process ends."""
    directory = tempfile.mkdtemp(prefix="llama-ray-", dir=PARENT)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name, value in cluster_variables(Path(directory)).items():
        environment.setdefault(name, value)


def is_behind_python_proxy(environment: Mapping[str, str] = os.environ) -> bool:
    """In a replica: whether requests come through Serve's proxy in Python, and not by HAProxy or directly."""
    direct = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
    return not any(environment.get(name, "0") == "1" for name in direct)


SLOWER: Final = (
    "requests come through Serve's proxy in Python, which takes processor time from the ranks with many clients, and has no "
    "limits for slow clients: start by `llama-ray up CONFIG`, or set RAY_SERVE_ENABLE_HA_PROXY=1 before Ray starts"
)
