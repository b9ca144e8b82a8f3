"""A request is captured from a real server and replayed there: the same tokens, and each difference named."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_core.checkpoint.digest import CheckpointDigest, sha256_of
from tests.cli.conftest import llama_ray
from tests.conftest import GOLDEN
from tests.support import http
from tests.support.server import Server

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_captured_request_gives_the_same_tokens_again(plain: Server, tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "capture.json"
    fields = ["max_tokens=40", "temperature=0.9", "n=2", "logprobs=1", f"stream={json.dumps(stream)}"]
    words = [word for field in fields for word in ("--set", field)]
    done = llama_ray("capture", "--prompt", "once upon a time", *words, "--url", plain.url, "-o", str(file))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    checkpoint = sorted((GOLDEN / "mp1").iterdir())
    assert found["model"]["digest"] and found["outcome"] == "complete" and found["settings"]["ranks"] == 2
    assert found["settings"]["dtypes"] and found["versions"]["torch"] != "absent"
    named = {path.name: sha256_of(path) for path in checkpoint}
    digests = {CheckpointDigest(tuple((name, named[name]) for name in names)).value for names in _orders(named)}
    assert found["model"]["digest"] in digests, "the digest is that of the checkpoint's files"
    assert sum(len(choice["tokens"]) for choice in found["choices"]) > 2
    again = llama_ray("replay", str(file), "--url", plain.url)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.startswith("the same ") and len(again.stdout.splitlines()) == 1, again.stdout

    found["seed"] += 1
    file.write_text(json.dumps(found))
    other = llama_ray("replay", str(file), "--url", plain.url)
    assert other.returncode == 1 and "differs" in other.stdout and "then: " in other.stdout


def _orders(named: dict[str, str]) -> list[list[str]]:
    weights = sorted(name for name in named if name.endswith(".pth"))
    return [["params.json", *weights], [*weights, "params.json"], sorted(named)]


def test_a_server_without_a_folder_refuses(demo: Server) -> None:
    body = {"prompt": "once", "max_tokens": 2}
    answer = http.post(f"{demo.url}/v1/completions", json=body, headers={"X-Capture": "1"}, timeout=60)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "capture_not_allowed"
