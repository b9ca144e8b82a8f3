"""Remote models on this node, by the real huggingface_hub and s3fs against servers on loopback."""

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import s3fs
from gguf import GGMLQuantizationType as Encoding
from huggingface_hub import constants, snapshot_download

from llama_core.backends.memory_estimate import RankMemory, describe_checkpoint, estimate_memory
from llama_core.config import EngineConfig
from llama_core.errors import DamagedDownload, FetchError, LlamaError, Unreachable
from llama_core.remote.model_files import RemoteModel
from llama_core.remote.names import remote_name
from llama_core.remote.store import check_downloads, fetch, fetched, local, local_path, outline, pin
from tests.support import hugging_face
from tests.support.fake_hub import FakeHub
from tests.support.fake_s3 import fake_s3
from tests.support.gguf_models import write_gguf
from tests.support.programs import REPOSITORY
from tests.support.waiting import wait_until

REPO = "lab/tiny"
WEIGHTS = "model.safetensors"
BIG = os.urandom(30_000_000)  # the client writes in steps of 10 MiB


def named(text: str) -> Any:
    name = remote_name(text)
    assert name is not None
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in Hugging Face's format, with files that no server reads."""
    folder = tmp_path / "published"
    folder.mkdir()
    config = hugging_face.CONFIGS["qwen3"] | {"num_hidden_layers": 12}
    hugging_face.write(folder, config, hugging_face.random_weights(hugging_face.read(config)), 1)
    for name in ("pytorch_model.bin", "modeling_tiny.py", "original/consolidated.00.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never read")
    return folder


def planned(folder: Path) -> list[RankMemory]:
    return estimate_memory(EngineConfig(str(folder), hugging_face.VOCAB_SIZE, 64, 2, backend="torch"), 2).ranks


def big(**more: bytes) -> Mapping[str, bytes]:
    return {"config.json": b"{}", WEIGHTS: BIG, **more}


def test_what_is_read_is_fetched_once_and_found_again_without_the_hub(hub: FakeHub, folder: Path) -> None:
    commit = hub.add(REPO, folder)
    model = pin(named(REPO))
    assert str(model.name) == f"hf://{REPO}@{commit}" and local_path(model) is None
    path = fetch(model)
    assert {file.name for file in path.iterdir()} == {"config.json", WEIGHTS}
    assert all((path / file.name).read_bytes() == (folder / file.name).read_bytes() for file in model.files)
    hub.requests.clear()
    assert fetch(model) == path == Path(local(str(model.name))) and hub.requests == []
    hub.down = True
    assert pin(named(REPO)) == pin(named(f"{REPO}@{commit}")) == model and outline(model) == path


def test_a_pinned_model_stays_when_the_repository_moves_on(hub: FakeHub, folder: Path) -> None:
    hub.add(REPO, folder)
    first = pin(named(REPO))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    hub.add(REPO, folder)
    second = pin(named(REPO))
    assert first.name != second.name and pin(first.name) == first
    assert (
        not (fetch(first) / "generation_config.json").exists() and (fetch(second) / "generation_config.json").exists()
    )


def test_what_was_served_serves_again_though_only_headers_of_a_later_revision_are_here(
    hub: FakeHub, folder: Path
) -> None:
    hub.add(REPO, folder)
    served = fetched(REPO)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    hub.add(REPO, folder)
    later = pin(named(REPO))
    outline(later)
    hub.down = True
    assert fetched(REPO) == served
    hub.down = False
    newest = fetch(later)
    hub.down = True
    assert fetched(REPO) == newest != served


def test_the_pooling_of_embeddings_lies_in_its_folder(hub: FakeHub) -> None:
    hub.add(REPO, big(**{"modules.json": b"[]", "1_Pooling/config.json": b"{}"}))
    assert (fetched(REPO) / "1_Pooling" / "config.json").read_bytes() == b"{}"


def test_files_of_other_sizes_are_fetched_again(hub: FakeHub) -> None:
    hub.add(REPO, big())
    path = fetched(REPO) / WEIGHTS
    os.truncate(path.resolve(), 5)
    assert (fetched(REPO) / WEIGHTS).read_bytes() == BIG


@pytest.mark.parametrize("name", ["/etc/x.gguf", "../x.gguf", "a/../../x.gguf", "a\x1b[2J.gguf"])
def test_names_that_lead_elsewhere_are_not_files_of_the_model(hub: FakeHub, name: str) -> None:
    hub.add(REPO, {name: b"GGUF"})
    with pytest.raises(FetchError, match="neither"):
        pin(named(REPO))


def test_what_another_program_has_fetched_serves_without_the_hub(hub: FakeHub, folder: Path) -> None:
    hub.add(REPO, folder)
    snapshot = snapshot_download(REPO)
    hub.down = True
    assert (fetched(REPO) / WEIGHTS).samefile(Path(snapshot) / WEIGHTS)
    assert {file.name for file in fetched(REPO).iterdir()} == {"config.json", WEIGHTS}, "no files of other formats"
    with pytest.raises(Unreachable):
        fetched(f"{REPO}:Q4_0")


def test_an_outline_gives_the_estimate_of_all_files(hub: FakeHub, folder: Path) -> None:
    hub.add(REPO, folder)
    at = outline(pin(named(REPO)))
    assert 8 < hub.bytes_served[WEIGHTS] < (folder / WEIGHTS).stat().st_size / 10
    assert at != folder and (at / WEIGHTS).stat().st_size == (folder / WEIGHTS).stat().st_size
    assert planned(at) == planned(folder)
    served = hub.bytes_served[WEIGHTS]
    assert outline(pin(named(REPO))) == at and hub.bytes_served[WEIGHTS] == served


def test_an_outline_of_a_gguf_file_ends_with_its_header(hub: FakeHub, tmp_path: Path) -> None:
    import numpy as np

    metadata = {"general.name": "x", "tokenizer.ggml.tokens": [f"token {i}" for i in range(200_000)]}
    tensors = {f"blk.{i}.attn_q.weight": np.ones((1024, 1024), np.float32) for i in range(8)}
    file = write_gguf(tmp_path / "m-Q8_0.gguf", "llama", metadata, tensors, Encoding.Q8_0)
    hub.add(REPO, {"m-Q8_0.gguf": file, "m-Q4_0.gguf": b"GGUF"})
    at = outline(pin(named(f"{REPO}:Q8_0")))
    assert at.name == "m-Q8_0.gguf" and at.stat().st_size == file.stat().st_size
    header = 200_000 * (8 + 10)
    assert header < hub.bytes_served["m-Q8_0.gguf"] < 3 * header < file.stat().st_size
    assert at.read_bytes()[:header] == file.read_bytes()[:header]


def test_a_family_that_is_not_served_is_refused_before_its_weights_are_fetched(hub: FakeHub, folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("qwen3", "cohere2").replace("Qwen3", "Cohere2"))
    hub.add(REPO, folder)
    with pytest.raises(LlamaError, match="cohere2"):
        describe_checkpoint(outline(pin(named(REPO))))
    assert hub.bytes_served[WEIGHTS] < (folder / WEIGHTS).stat().st_size / 10


def test_a_download_goes_on_where_it_was_cut(hub: FakeHub) -> None:
    hub.add(REPO, big())
    hub.cut(WEIGHTS, 15_000_000, times=2)
    seen: list[int] = []
    model = pin(named(REPO))
    fetch(model, lambda done, total: seen.append(done))
    assert (Path(local(str(model.name))) / WEIGHTS).read_bytes() == BIG
    assert hub.bytes_served[WEIGHTS] < 1.7 * len(BIG) and seen == sorted(seen) and seen[-1] <= model.size


PROGRAM = """
import sys
from llama_core.remote.store import fetched
print(fetched(sys.argv[1]))
"""


def start(hub: FakeHub, home: Path, text: str = REPO) -> subprocess.Popen[str]:
    variables = (
        os.environ | hub.environment(home) | {"LLAMA_CACHE_DIR": str(home / "cache"), "PYTHONPATH": str(REPOSITORY)}
    )
    command = [sys.executable, "-c", PROGRAM, text]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_download_that_is_killed_at_random_moments_ends_whole(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, big())
    hub.bytes_per_s = 30e6
    chance = random.Random(5)
    for _ in range(10):
        process, wanted = start(hub, tmp_path / "home"), hub.bytes_served[WEIGHTS] + chance.randint(1, 10_000_000)
        wait_until("a part is here", lambda wanted=wanted: hub.bytes_served[WEIGHTS] >= wanted)  # type: ignore[misc]
        process.kill()
        process.communicate()
    hub.bytes_per_s = float("inf")
    path, errors = start(hub, tmp_path / "home").communicate()
    assert path, errors
    assert (Path(path.strip()) / WEIGHTS).read_bytes() == BIG


def test_of_several_processes_on_a_node_one_downloads(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, big())
    hub.bytes_per_s = 30e6
    ends = [process.communicate() for process in [start(hub, tmp_path / "home") for _ in range(3)]]
    assert len({path for path, _ in ends}) == 1 and ends[0][0], ends
    assert hub.bytes_served[WEIGHTS] == len(BIG)


def test_a_damaged_file_is_removed_and_fetched_again(hub: FakeHub) -> None:
    hub.add(REPO, big())
    hub.damage(WEIGHTS)
    model = pin(named(REPO))
    path = fetch(model)
    with pytest.raises(DamagedDownload, match=rf"{WEIGHTS} was damaged: .* publishes"):
        check_downloads(model)
    assert local_path(model) is None and fetch(model) == path
    check_downloads(model)
    assert (path / WEIGHTS).read_bytes() == BIG
    with pytest.raises(DamagedDownload):
        check_downloads(model, {WEIGHTS: "0" * 64})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lab/tinny", r"no such repository at http.* \(did you mean lab/tiny.*\?\); if it is private, set HF_TOKEN"),
        ("lab/secret", "no such repository at .*; if it is private, set HF_TOKEN"),
        ("lab/gated", "is gated: accept its terms at .*/lab/gated, and set HF_TOKEN"),
        (f"{REPO}@v9", "has no revision 'v9'"),
        (f"{REPO}:Q4_0", "no GGUF files for Q4_0"),
        ("lab/pickled", "only .bin, which are not read"),
    ],
)
def test_what_cannot_be_had_is_told_with_its_remedy(hub: FakeHub, text: str, words: str) -> None:
    files = {"config.json": b"{}", WEIGHTS: b"12345678"}
    hub.add(REPO, files)
    hub.add("lab/secret", files, private=True)
    hub.add("lab/gated", files, gated=True)
    hub.add("lab/pickled", {"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(FetchError, match=words) as refused:
        outline(pin(named(text)))
    assert "\n" not in refused.value.message and not isinstance(refused.value, Unreachable)


def test_a_token_opens_private_and_gated_models(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens = {"owner"}
    monkeypatch.setenv("HF_TOKEN", "owner")
    for name in ("private", "gated"):
        files = {"config.json": b"{}", WEIGHTS: b"12345678"}
        hub.add(f"lab/{name}", files, private=name == "private", gated=name == "gated")
        assert (fetched(f"lab/{name}") / WEIGHTS).read_bytes() == b"12345678"


def test_without_a_network_the_error_names_what_the_cache_has(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, big())
    fetched(REPO)
    hub.down = True
    with pytest.raises(Unreachable, match=r"http.* cannot be reached .*, and the cache has lab/tiny"):
        pin(named("lab/other"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match="HF_HUB_OFFLINE is set, and the cache has only revision"):
        pin(named(f"{REPO}@v2"))


def test_a_full_disk_is_told_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, big())
    free = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(
        FetchError, match=r"needs 30\.0 MB more in .*, where 1\.0 MB are free: make room, or set HF_HOME"
    ):
        fetched(REPO)
    assert WEIGHTS not in hub.bytes_served


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()  # an instance has read the variables of an earlier server


@pytest.mark.usefixtures("store")
def test_a_folder_of_an_object_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_s3("models", folder) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        model: RemoteModel = pin(named("s3://models"))
        at = outline(model)
        assert planned(at) == planned(folder)
        path = fetch(model)
        assert (path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes() and local(str(model.name)) == str(path)
        assert sorted(file.name for file in path.iterdir()) == ["config.json", WEIGHTS]
        with pytest.raises(FetchError, match="there is no such file, folder or bucket"):
            pin(named("s3://absent/folder"))
        content = (folder / "config.json").read_bytes()
        s3fs.S3FileSystem().pipe_file("models/config.json", content.replace(b'"', b"'"))  # of the same size
        shutil.rmtree((path / WEIGHTS).resolve().parent)
        with pytest.raises(FetchError, match="has changed since the server started"):
            fetch(model)
        assert pin(named("s3://models")).name != model.name
    assert pin(model.name) == model


@pytest.mark.usefixtures("store")
def test_a_file_of_a_web_server_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", {"general.name": "x"}, {})
    hub.add(REPO, {"m.gguf": file.read_bytes() + BIG})
    hub.cut("m.gguf", 1_000_000)
    url = f"{hub.url}/{REPO}/resolve/main/m.gguf"
    model = pin(named(url))
    path = fetch(model)
    assert path.name == "m.gguf" and path.read_bytes() == file.read_bytes() + BIG
    here = path.resolve()
    here.rename(here.with_name("m.gguf.incomplete"))
    with here.with_name("m.gguf.incomplete").open("r+b") as part:
        part.truncate(20_000_000)
    hub.bytes_served.clear()
    assert fetch(model).read_bytes() == file.read_bytes() + BIG
    assert hub.bytes_served["m.gguf"] == file.stat().st_size + len(BIG) - 20_000_000
    hub.down = True
    assert pin(named(url)) == model, "of an earlier start"
    hub.down = False
    with pytest.raises(FetchError, match="there is no such file"):
        pin(named(f"{hub.url}/{REPO}/resolve/main/absent.gguf"))
    with pytest.raises(FetchError, match=r"must end in \.gguf"):
        pin(named(f"{hub.url}/{REPO}"))
    assert threading.active_count() < 50
