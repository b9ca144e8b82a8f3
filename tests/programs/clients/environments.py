"""Makes the environment of a client, once for each list of requirements, in a folder that later runs use again."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tests.programs.clients.table import Client

COMPLETE = "complete.json"  # written last: an environment without it is made anew
INSTALL_LIMIT_S = 3600.0


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-ray-clients"


def prepared(client: Client, folder: Path) -> Path:
    """The folder of the client's environment, made if it is not there. CalledProcessError has the output of pip or npm."""
    key = [client.kind, *client.requirements, *client.without_dependencies]
    if client.kind == "python":
        key.append(platform.python_version())
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    environment = folder.resolve() / f"{client.kind}-{digest}"
    if (environment / COMPLETE).exists():
        return environment
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir(parents=True)
    if client.kind == "python":
        _install_python(client, environment)
    elif client.kind == "node":
        (environment / "package.json").write_text('{"private": true, "type": "module"}')
        _run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *client.requirements, folder=environment)
    (environment / COMPLETE).write_text(json.dumps(key))
    return environment


def _install_python(client: Client, environment: Path) -> None:
    _run(sys.executable, "-m", "venv", str(environment), folder=environment)
    pip = (str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet")
    together = [item for item in client.requirements if item not in client.without_dependencies]
    _run(*pip, *together, folder=environment)
    if client.without_dependencies:
        _run(*pip, "--no-deps", *client.without_dependencies, folder=environment)


def _run(*command: str, folder: Path) -> None:
    subprocess.run(
        command,
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_LIMIT_S,
    )
