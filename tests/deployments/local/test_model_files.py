"""Missing and unreadable files of the model, which `llama-ray up` finds before it starts Ray."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.programs import free_port
from deployments.args import PROJECT_ROOT
from deployments.local import process_tag, up
from deployments.local.config_file import ConfigFile
from deployments.local.model_files import check_model_files
from deployments.local.shutdown import Shutdown
from llama_core.errors import ConfigError

NOBODY = 65534


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(PROJECT_ROOT / "demo", tmp_path / "model"))


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """Without root's permission to read every file, where root runs the tests."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def check(application: dict[str, Any]) -> None:
    check_model_files(ConfigFile(Path("serve_config.yaml"), {"applications": [application]}))


def application(ckpt_dir: Path, **args: Any) -> dict[str, Any]:
    return {"import_path": "deployments.app:build_app", "args": {"ckpt_dir": str(ckpt_dir), **args}}


def test_a_whole_model_passes(model: Path) -> None:
    check(application(model))
    check(application(model, tokenizer_path=str(model / "tokenizer.model")))


def without_folder(model: Path) -> None:
    shutil.rmtree(model)


def without_params(model: Path) -> None:
    (model / "params.json").unlink()


def without_a_shard(model: Path) -> None:
    (model / "consolidated.00.pth").unlink()


def with_a_cut_shard(model: Path) -> None:
    os.truncate(model / "consolidated.01.pth", 1000)


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.model").unlink()


def with_a_link_to_nothing(model: Path) -> None:
    (model / "tokenizer.model").unlink()
    (model / "tokenizer.model").symlink_to("moved.model")


def with_two_gguf_models(model: Path) -> None:
    for file in model.iterdir():
        file.unlink()
    for name in ("small.gguf", "large.gguf"):
        (model / name).touch()


@pytest.mark.parametrize(
    ("spoil", "named", "remedy"),
    [
        (without_folder, "model cannot be read: No such file", "set ckpt_dir to"),
        (without_params, "params.json cannot be read: No such file", "set ckpt_dir to"),
        (without_a_shard, "consolidated.00.pth: this shard is missing", "set ckpt_dir to"),
        (with_a_cut_shard, "consolidated.01.pth: damaged", "set ckpt_dir to"),
        (with_two_gguf_models, "has 2 GGUF models", "set ckpt_dir to one of large.gguf, small.gguf"),
        (without_tokenizer, "tokenizer.model cannot be read: No such file", "set tokenizer_path"),
        (with_a_link_to_nothing, "tokenizer.model cannot be read: No such file", "set tokenizer_path"),
    ],
)
def test_a_fault_is_named_with_its_remedy(model: Path, spoil: Callable[[Path], None], named: str, remedy: str) -> None:
    spoil(model)
    with pytest.raises(ConfigError) as refused:
        check(application(model))
    message = refused.value.message
    assert str(model) in message and named in message and remedy in message
    assert message.count("set ") == 1 and "\n" not in message


@pytest.mark.parametrize("name", ["params.json", "consolidated.01.pth", "tokenizer.model", "."])
def test_a_file_that_this_user_may_not_read_is_named(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # not below pytest's folder, which is closed to other users
        Path(directory).chmod(0o755)
        model = Path(shutil.copytree(PROJECT_ROOT / "demo", Path(directory) / "model"))
        check(application(model))  # imports the formats, for which the other user may lack permission
        (model / name).chmod(0)
        with ordinary_user(), pytest.raises(ConfigError, match="Permission denied") as refused:
            check(application(model))
        (model / name).chmod(0o755)
        assert str(model / name) in refused.value.message


def test_a_missing_tokenizer_is_found_beside_a_whole_checkpoint(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.model") as refused:
        check(application(model, tokenizer_path=str(model / "absent.model")))
    assert refused.value.param == "tokenizer_path"


def test_a_setting_in_the_environment_is_checked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_TOKENIZER_PATH", str(model / "elsewhere.model"))
    with pytest.raises(ConfigError, match=r"elsewhere\.model"):
        check(application(model))


@pytest.mark.parametrize(
    "changed",
    [
        {"import_path": "compose_app:build_app"},
        {"runtime_env": {"working_dir": "models.zip"}},
        {"deployments": [{"name": "LlamaIngress", "ray_actor_options": {"runtime_env": {"image_uri": "served"}}}]},
    ],
    ids=["other code", "the application's runtime_env", "the replica's runtime_env"],
)
def test_an_application_whose_files_may_be_elsewhere_is_not_judged(changed: dict[str, Any]) -> None:
    absent = application(Path("/nowhere/model"))
    with pytest.raises(ConfigError):
        check(absent)
    check(absent | changed)


def test_wrong_arguments_are_named_before_files() -> None:
    with pytest.raises(ConfigError, match=r"^max_seq_len: must be a whole number.*; max_sequences: no such argument; "):
        check(application(Path("/nowhere/model"), max_seq_len="x", max_sequences=5))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size: must be at least 1"),
        ({"drain_timeout_s": 0}, "drain_timeout_s: must be more than 0"),
        ({"device": "tpu"}, "device: must be one of 'auto', 'cpu' or 'cuda'"),
        ({"verify_checksums": "perhaps"}, "verify_checksums: must be true or false"),
        ({"max_seqlen": 5}, "max_seqlen: no such argument; did you mean max_seq_len?"),
        ({"zzz": 5}, "zzz: no such argument; docs/configuration.md lists every argument"),
    ],
)
def test_a_wrong_argument_is_explained_in_the_words_of_this_server(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(application(Path("/nowhere/model"), **given))
    assert refused.value.message == says


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `serve_file` starts, instead of Ray."""
    begun: list[str] = []
    monkeypatch.setattr(up, "_run", lambda *_: begun.append("Ray"))
    monkeypatch.setattr(up, "keep_files_private", lambda: None)
    monkeypatch.setattr(process_tag, "start_watcher", lambda *_: None)
    monkeypatch.setattr(Shutdown, "start", lambda _: None)
    monkeypatch.setattr(Shutdown, "end", lambda _: sys.exit(1))
    monkeypatch.setattr(up, "_set_environment", lambda *_, **__: False)
    return begun


@pytest.mark.parametrize(
    ("address", "starts"), [(None, []), ("local", []), ("auto", ["Ray"]), ("10.0.0.7:6379", ["Ray"])]
)
def test_up_judges_the_files_only_for_a_cluster_that_it_starts(
    tmp_path: Path,
    address: str | None,
    starts: list[str],
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = tmp_path / "config.yaml"
    http_options = {"host": "127.0.0.1", "port": free_port()}
    config.write_text(
        yaml.safe_dump({"http_options": http_options, "applications": [application(Path("/nowhere/model"))]})
    )
    with pytest.raises(SystemExit, match="1"):
        sys.exit(up.serve_file(config, verbose=True))
    assert started == starts
    assert capfd.readouterr().err.startswith("/nowhere/model cannot be read") is not bool(starts)
