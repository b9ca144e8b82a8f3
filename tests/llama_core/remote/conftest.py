from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem, constants

from tests.support.fake_hub import FakeHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """For this process, whose `huggingface_hub` has read its variables already."""
    with FakeHub() as hub:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "cache"))
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_TELEMETRY": True,  # which asks the hub about agents, once in each process
        }.items():
            monkeypatch.setattr(constants, name, value)
        HfFileSystem.clear_instance_cache()  # an earlier hub may have had the same port
        yield hub
