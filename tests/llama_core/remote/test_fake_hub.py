"""The real `huggingface_hub` and s3fs against the servers on loopback that other tests use in place of the hub and S3."""

import hashlib
import sys
from pathlib import Path

import pytest
import s3fs
from huggingface_hub import HfApi, HfFileSystem, errors, snapshot_download

from tests.support.fake_hub import FakeHub
from tests.support.fake_s3 import fake_s3
from tests.support.programs import output_of

REPO = "lab/tiny"
WEIGHTS = bytes(range(251)) * 100_000  # 25.1 MB, which the client writes in steps of 10 MiB
FILES = {"config.json": b"{}", "original/params.json": b"{ }", "model.safetensors": b"0123456789"}


def contents(folder: str) -> dict[str, bytes]:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_metadata_names_sizes_hashes_and_the_commit(hub: FakeHub) -> None:
    api, sha = HfApi(), hub.add(REPO, FILES)
    info = api.model_info(REPO, files_metadata=True)
    blobs = {blob.rfilename: blob for blob in info.siblings or []}
    assert (info.sha, {name: blob.size for name, blob in blobs.items()}) == (sha, {n: len(b) for n, b in FILES.items()})
    assert blobs["config.json"].blob_id == hashlib.sha1(b"blob 2\0{}").hexdigest() and not blobs["config.json"].lfs
    lfs = blobs["model.safetensors"].lfs
    assert lfs and lfs.sha256 == hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert [entry.path for entry in api.list_repo_tree(REPO)] == ["config.json", "model.safetensors", "original"]
    assert [entry.path for entry in api.get_paths_info(REPO, ["none", "original"])] == ["original"]
    assert [found.id for found in api.list_models(search="TINY")] == [REPO]


def test_a_snapshot_is_fetched_once_and_an_earlier_commit_stays(hub: FakeHub) -> None:
    first = hub.add(REPO, FILES)
    assert contents(snapshot_download(REPO)) == FILES
    second = hub.add(REPO, FILES | {"config.json": b"[]"})
    assert contents(snapshot_download(REPO, allow_patterns=["*.json", "*.safetensors"]))["config.json"] == b"[]"
    assert hub.bytes_served == {name: len(FILES[name]) for name in FILES} | {"config.json": 4}
    hub.requests.clear()
    assert [contents(snapshot_download(REPO, revision=sha))["config.json"] for sha in (first, second)] == [b"{}", b"[]"]
    assert hub.requests == []


def test_patterns_select_files_of_any_branch(hub: FakeHub) -> None:
    hub.add(REPO, FILES, branch="release/1")
    folder = snapshot_download(REPO, revision="release/1", allow_patterns="*.json", ignore_patterns="original/*")
    assert set(contents(folder)) == {"config.json"}


def test_another_process_finds_the_hub_and_its_cache_by_variables(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, FILES)
    code = f"import huggingface_hub; print(huggingface_hub.snapshot_download({REPO!r}))"
    folder = output_of([sys.executable, "-c", code], hub.environment(tmp_path / "home")).strip()
    assert contents(folder) == FILES and Path(folder).is_relative_to(tmp_path / "home")


def test_a_download_that_is_cut_goes_on_where_it_was(hub: FakeHub) -> None:
    hub.add(REPO, {"model.safetensors": WEIGHTS})
    hub.cut("model.safetensors", after_bytes=15_000_000)
    assert contents(snapshot_download(REPO)) == {"model.safetensors": WEIGHTS}
    bodies = [asked for method, path, asked in hub.requests if method == "GET" and path.startswith("/cdn/")]
    assert bodies == [None, "bytes=10485760-"]
    assert hub.bytes_served["model.safetensors"] == 15_000_000 + len(WEIGHTS) - 10_485_760


def test_damage_keeps_the_size_and_the_published_hash(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(WEIGHTS)
    hub.add(REPO, {"model.safetensors": tmp_path / "weights"})
    hub.damage("model.safetensors")
    damaged, whole = (contents(snapshot_download(REPO, force_download=force)) for force in (False, True))
    assert len(damaged["model.safetensors"]) == len(WEIGHTS) and damaged["model.safetensors"] != WEIGHTS
    assert whole["model.safetensors"] == WEIGHTS


def test_private_and_gated_repositories_ask_for_a_token_with_access(hub: FakeHub) -> None:
    hub.tokens, hub.tokens_without_access = {"owner"}, {"other"}
    hub.add("lab/private", FILES, private=True)
    hub.add("lab/gated", FILES, gated=True)
    for token, status in ((False, 401), ("other", 404)):
        with pytest.raises(errors.RepositoryNotFoundError) as private:
            snapshot_download("lab/private", token=token)
        assert private.value.response.status_code == status
    for token, status in ((False, 401), ("other", 403)):
        with pytest.raises(errors.GatedRepoError) as gated:
            snapshot_download("lab/gated", token=token)
        assert gated.value.response.status_code == status
    with pytest.raises(errors.HfHubHTTPError, match="Invalid credentials"):
        snapshot_download("lab/gated", token="expired")
    assert HfApi().model_info("lab/gated").gated == "manual" and [*HfApi().list_models(search="private")] == []
    assert [contents(snapshot_download(f"lab/{name}", token="owner")) for name in ("private", "gated")] == [FILES] * 2


def test_what_there_is_not_and_a_hub_that_is_down(hub: FakeHub) -> None:
    hub.add(REPO, FILES)
    with pytest.raises(errors.RepositoryNotFoundError):
        snapshot_download("lab/none")
    with pytest.raises(errors.RevisionNotFoundError):
        snapshot_download(REPO, revision="none")
    hub.down = True
    with pytest.raises(errors.LocalEntryNotFoundError, match="ConnectError"):
        snapshot_download(REPO)
    hub.down = False
    fetched = snapshot_download(REPO)
    hub.down = True
    assert snapshot_download(REPO) == fetched


def test_the_file_system_reads_a_range(hub: FakeHub) -> None:
    hub.add(REPO, {"model.safetensors": WEIGHTS})
    found = HfFileSystem().cat_file(f"{REPO}/model.safetensors", start=1000, end=1010, cache_type="none")
    assert (found, hub.bytes_served["model.safetensors"]) == (WEIGHTS[1000:1010], 10)


def test_s3fs_finds_files_and_reads_a_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(WEIGHTS)
    with fake_s3("models", {"tiny/config.json": b"{}", "tiny/model.safetensors": tmp_path / "weights"}) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        sizes = {name: each["size"] for name, each in files.find("models/tiny", detail=True).items()}
        assert sizes == {"models/tiny/config.json": 2, "models/tiny/model.safetensors": len(WEIGHTS)}
        assert files.cat_file("models/tiny/model.safetensors", start=1000, end=1010) == WEIGHTS[1000:1010]
