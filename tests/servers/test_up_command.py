"""`llama-ray up` with API keys, on a port that is taken, with a misspelt argument, and ended by two Ctrl-C."""

import signal
import subprocess
import time

import httpx
import pytest

from tests.servers.conftest import API_KEYS
from tests.support import http
from tests.support.programs import REPOSITORY, environment
from tests.support.server import UP, Server, served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

WITH_KEY = {"Authorization": f"Bearer {API_KEYS[1]}"}


def test_with_keys_the_server_reports_ready_and_asks_for_a_key(with_keys: Server) -> None:
    assert with_keys.get("/props")[0] == with_keys.get("/v1/models")[0] == 401
    assert with_keys.get("/health")[0] == 200
    answer = http.get(f"{with_keys.url}/metrics", headers=WITH_KEY, timeout=60)
    assert answer.status_code == 200
    # The command itself sends GET /props once the server is ready.
    assert 'requests_total{outcome="invalid_api_key",path="/v1/models"} 1.0' in answer.text
    wait_until("the banner is printed", lambda: "Llama on Ray is ready" in with_keys.output())
    assert "asks for an API key" in with_keys.output() and "Bearer KEY" in with_keys.output()
    assert "kq7" not in with_keys.output(), "keys are never written"


def test_a_second_server_on_the_same_port_is_refused(with_keys: Server) -> None:
    second = subprocess.run(
        [*UP, str(with_keys.config)],
        cwd=REPOSITORY,
        env=environment(RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert second.returncode != 0 and f"127.0.0.1:{with_keys.port} cannot be used" in second.stderr


def test_a_second_ctrl_c_ends_all_processes_at_once(with_keys: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
    url = f"{with_keys.url}/v1/completions"
    with httpx.Client(headers=WITH_KEY, timeout=90) as http, http.stream("POST", url, json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        for _ in range(2):
            with_keys.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        begin = time.monotonic()
        assert with_keys.process.wait(120) == 0
        assert time.monotonic() - begin < 60
    assert with_keys.wait_gone() == {}


def test_a_misspelt_argument_stops_the_start_and_is_named() -> None:
    with served(args={"max_batchsize": 4}) as running:
        assert running.process.wait(180) == 1
        assert running.output().splitlines() == ["max_batchsize: no such argument"], "nothing else was started"
        assert running.wait_gone() == {}
