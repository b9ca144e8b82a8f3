"""Runs the first commands of README.md in an empty environment, with the packages of the registries, and asks for a chat.

    python -m tests.programs.empty_environment    # with PIP_RETRIES=0 where an index cannot be reached

Prints a line of JSON: seconds of the installation and until the server was ready, the environment's size, and the answer.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.harness.programs import free_port
from tests.support import http
from tests.support.programs import REPOSITORY
from tests.support.server import CHAT
from tests.support.wheels import built_wheel

LIMIT_S = 1800.0


def commands() -> tuple[str, str]:
    """What installs the wheel, and what serves."""
    readme = (REPOSITORY / "README.md").read_text()
    ((install, serve),) = re.findall(r"^    (pip install .*)\n    (llama-ray up [^#\n]*\w)", readme, re.MULTILINE)
    return install, serve


def main() -> None:
    install, serve = commands()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(built_wheel(folder / "build"), folder)
        environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        private = ("RAY_", "LLAMA_", "PYTHON", "VIRTUAL_ENV")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(private)}
        variables |= {"HOME": name, "PATH": f"{environment}/bin:/usr/bin:/bin", "PIP_CACHE_DIR": f"{folder}/downloads"}

        begun_s = time.monotonic()
        subprocess.run(install, shell=True, cwd=folder, env=variables, stdout=sys.stderr, check=True)
        installed_s = time.monotonic()
        size = sum(file.stat().st_size for file in environment.rglob("*") if file.is_file())

        port = free_port()
        url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT_S
        command = f"exec {serve} http_options.port={port}"
        server = subprocess.Popen(command, shell=True, cwd=folder, env=variables, stdout=sys.stderr)
        try:
            while not is_ready(url):
                assert server.poll() is None and time.monotonic() < deadline_s, "the server is not ready"
                time.sleep(0.2)
            ready_s = time.monotonic()
            body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
            answer = http.post(url + CHAT, json=body, timeout=60).json()["choices"][0]["message"]["content"]
        finally:
            server.send_signal(signal.SIGINT)
            status = server.wait(180)
        found = {"install_s": round(installed_s - begun_s, 1), "megabytes": size // 10**6}
        print(json.dumps(found | {"ready_s": round(ready_s - installed_s, 1), "answer": answer, "status": status}))
        assert "demo model" in answer and status == 0


def is_ready(url: str) -> bool:
    try:
        return http.get(f"{url}/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
