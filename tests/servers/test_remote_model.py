"""A server of a remote model: `llama-ray up org/name`, as a user starts it."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.programs import free_port
from llama_core import Llama
from llama_core.backends.native.build import library_path
from tests.programs.remote_cluster import REPO, WEIGHTS, publish
from tests.support.fake_hub import FakeHub
from tests.support.programs import environment
from tests.support.server import UP
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add(REPO, publish(tmp_path_factory.mktemp("published")))
        yield hub


def test_a_hubs_model_is_fetched_served_and_served_again_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    port, url = free_port(), ""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    shutil.copy2(library_path(), cache)  # else it would be compiled there
    folders = {"LLAMA_CACHE_DIR": str(cache), "XDG_STATE_HOME": str(tmp_path)}
    variables = environment(**hub.environment(tmp_path), **folders, RAY_ADDRESS="local")
    body = {"prompt": "The capital", "temperature": 0, "max_tokens": 8}
    answers, served = [], []
    for is_down in (False, True):
        hub.down = is_down
        command = [*UP, REPO, "--port", str(port), "--ranks", "1", "--api-key", "secret", "max_seq_len=256"]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
            url, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer secret"}

            def is_ready(process: subprocess.Popen[bytes] = process, url: str = url) -> bool:
                assert process.poll() is None
                try:
                    return httpx.get(f"{url}/ready").status_code == 200
                except httpx.HTTPError:
                    return False

            try:
                wait_until("the server is ready", is_ready, 240)
                assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
                answers.append(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json())
                assert httpx.get(f"{url}/props", headers=headers).json()["checkpoint"].startswith(f"hf://{REPO}@")
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(120)
                output.seek(0)
                served.append(output.read())
    assert [answer["model"] for answer in answers] == ["tiny", "tiny"]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert f"fetching hf://{REPO}@" in served[0] and "cannot be reached" in served[1], served
    size = os.stat(next(tmp_path.rglob(f"snapshots/*/{WEIGHTS}"))).st_size
    assert hub.bytes_served[WEIGHTS] < 1.1 * size
    llama = Llama.build(next(tmp_path.rglob("snapshots/*")), max_seq_len=256, max_batch_size=1)
    by_path = llama.text_completion(["The capital"], temperature=0.0, max_gen_len=8)[0]["generation"]
    assert answers[0]["choices"][0]["text"].strip() == by_path.strip()
