"""A server that requires API keys: its banner, and a second server on its port."""

import subprocess

import pytest

from tests.servers.conftest import API_KEYS
from tests.support import http
from tests.support.http import samples
from tests.support.otlp_collector import Traced
from tests.support.programs import REPOSITORY, environment
from tests.support.server import UP, Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

WITH_OTHER_KEY = {"Authorization": f"Bearer {API_KEYS[1]}"}


@pytest.fixture
def server(traced: Traced) -> Server:
    return traced.server


def test_with_keys_the_server_reports_ready_and_asks_for_a_key(server: Server) -> None:
    for path, status in (("/props", 401), ("/v1/models", 401), ("/health", 200)):
        assert http.get(server.url + path, timeout=60).status_code == status
    assert http.get(f"{server.url}/metrics", headers=WITH_OTHER_KEY, timeout=60).status_code == 403
    assert "blocks_used" not in http.get(f"{server.url}/props", headers=WITH_OTHER_KEY, timeout=60).json()
    answer = http.get(f"{server.url}/metrics", headers=server.headers, timeout=60)
    assert answer.status_code == 200
    # The command itself sends GET /props once the server is ready.
    assert samples(answer.text)['llama_requests_total{outcome="invalid_api_key",path="/v1/models"}'] == 1
    wait_until("the banner is printed", lambda: "Llama on Ray is ready" in server.output())
    assert "asks for an API key" in server.output() and "Bearer KEY" in server.output()
    assert "kq7" not in server.output(), "keys are never written"


def test_a_second_server_on_the_same_port_is_refused(server: Server) -> None:
    second = subprocess.run(
        [*UP, str(server.config)],
        cwd=REPOSITORY,
        env=environment(RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = f"127.0.0.1:{server.port} is the port of another `llama-ray up`, process {server.process.pid}."
    assert second.returncode == 1 and said in second.stderr
