"""What each client's program shares: the server's address, and checks that print one line each.

This module runs in the client's environment, so it imports the standard library only.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any, Final

URL: Final = os.environ.get("CLIENT_SERVER_URL", "http://127.0.0.1:8000")
BASE_URL: Final = f"{URL}/v1"
MODEL: Final = "llama-demo"
QUESTION: Final = "What is 7 + 5?"
# A request that takes seconds, for timeouts and disconnects.
LONG: Final[dict[str, Any]] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}, "temperature": 1.5}
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_registered: Final[list[Callable[[], Any]]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a check, plain or async. Its name with spaces is the line that `run_checks` prints."""
    _registered.append(function)
    return function


def run_checks() -> None:
    """Run every registered check in order, print a line each, and exit with status 1 if one failed."""
    failed = 0
    for function in _registered:
        name = function.__name__.strip("_").replace("_", " ")
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:400]!r}", flush=True)
        else:
            print(f"ok {name}", flush=True)
    sys.exit(min(failed, 1))


def completed(*command: str, timeout_s: float, status: int = 0, folder: str | None = None) -> str:
    """What a command of the client prints, which ends with this status. It runs without this repository on its path."""
    done = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=folder,
    )
    assert done.returncode == status, done.stdout[-8000:]
    return done.stdout


def props() -> dict[str, Any]:
    """The answer of GET /props."""
    with urllib.request.urlopen(f"{URL}/props", timeout=30) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def wait_idle(timeout_s: float = 30.0) -> None:
    """Wait until no request runs and no cache block is in use, as after a disconnect."""
    deadline = time.monotonic() + timeout_s
    while (seen := props())["requests_running"] or seen["requests_waiting"] or seen["blocks_used"]:
        assert time.monotonic() < deadline, f"the server is not idle: {seen}"
        time.sleep(0.1)


def assert_weather(arguments: Any) -> None:
    """Assert that `arguments`, JSON or its value, follow the schema WEATHER."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city", "days"}, value
    assert isinstance(value["city"], str), value
    assert 1 <= value["days"] <= 9, value


def raised(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """The exception of class `kind` that `call` raises."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {str(result)[:200]}")
