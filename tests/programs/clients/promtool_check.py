"""`promtool check metrics` of what /metrics answers after chats, streams and errors."""

import json
import subprocess
import urllib.error
import urllib.request
from typing import Final

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, URL, check, run_checks

# Names of Meta's reference; other lint is a failure.
KEPT: Final = {
    "prefill_time_ms",
    "time_per_decoding_step_ms",
    "cuda_oom_errors_count",
    "invalid_dialog_assertions_count",
}


def post(**fields: object) -> int:
    """The status of a chat with these fields."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20} | fields
    request = urllib.request.Request(
        f"{BASE_URL}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def metrics(accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"{URL}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


@check
def only_the_names_that_are_kept_have_lint_after_chats_streams_and_errors() -> None:
    assert [post(), post(stream=True), post(n=2), post(temperature=9), post(model="none")] == [200, 200, 200, 400, 404]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics(), capture_output=True, text=True, timeout=60, check=False
    )
    lint = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert {line.split()[0] for line in lint} <= KEPT, lint


@check
def counters_are_typed_as_counters() -> None:
    kinds = dict(line.split()[2:4] for line in metrics().splitlines() if line.startswith("# TYPE "))
    assert kinds, "no types"
    assert all(kind == "counter" for name, kind in kinds.items() if name.endswith("_total")), kinds


if __name__ == "__main__":
    run_checks()
