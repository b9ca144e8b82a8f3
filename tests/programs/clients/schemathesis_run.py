"""schemathesis over every operation of the OpenAPI document: examples, boundary values, random bodies, links."""

import sys
import tempfile
from pathlib import Path

from tests.programs.clients.checks import URL, check, completed, run_checks, wait_idle

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
        printed = completed(*command, timeout_s=600, folder=directory)
    print("\n".join(line for line in printed.splitlines() if "Tested:" in line or "generated" in line))
    assert "Tested: " in printed, printed[-2000:]
    wait_idle()


if __name__ == "__main__":
    run_checks()
