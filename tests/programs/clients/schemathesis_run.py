"""schemathesis over every operation of the OpenAPI document: examples, boundary values, random bodies, links."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.programs.clients.checks import URL, check, run_checks, wait_idle

COMMAND = Path(sys.executable).with_name("schemathesis")
# JSON Schema cannot say every rule of a valid request: the order of roles, the size of the vocabulary and of the context.
EXCLUDED = "positive_data_acceptance"


@check
def every_operation_answers_as_its_document_says() -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(str(COMMAND), "run", f"{URL}/openapi.json", "--no-color", "--seed", "1", "--max-examples", "30"),
            *("--request-timeout", "60", "--exclude-checks", EXCLUDED, "--suppress-health-check", "all"),
        ]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False, cwd=directory)
    print("\n".join(line for line in done.stdout.splitlines() if "Tested:" in line or "generated" in line))
    assert "Tested: " in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0, done.stdout[-8000:]


@check
def the_server_is_idle_afterwards() -> None:
    wait_idle()


if __name__ == "__main__":
    run_checks()
