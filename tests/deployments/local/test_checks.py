"""The checks of `llama-ray up`: each fault is provoked, and named with its remedy before Ray starts."""

import contextlib
import hashlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from ray import serve

from benchmarks.harness.programs import free_port
from deployments.args import DEMO
from deployments.local import checks, process_tag, up
from deployments.local.checks import Finding, examine, exit_status, joined_cluster
from deployments.local.config_file import ConfigFile, read_config
from deployments.local.shutdown import Shutdown
from tests.support.checkpoints import WIDE, random_weights, split, write

NOBODY = 65534


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks, "usable_cpus", lambda: 2)
    monkeypatch.setattr(checks, "glob", lambda pattern: [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of 8 query heads with its tokenizer."""
    return write(tmp_path / "ckpt", split(random_weights(WIDE), 1))


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> Path:
    """A configuration that works here."""
    args = {"ckpt_dir": str(folder), "model_parallel_size": 2, "max_seq_len": 256, "device": "cpu"}
    application = {"name": "llama", "import_path": "deployments.app:build_app", "args": args}
    http_options = {"host": "127.0.0.1", "port": free_port()}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"http_options": http_options, "applications": [application]}))
    return path


def failures(config: Path, *overrides: str, reads_files: bool = True) -> dict[str, Finding]:
    """The failed checks by name."""
    read = read_config(config, overrides)
    return {found.check: found for found in examine(read, None, reads_files=reads_files) if found.status == "fail"}


def test_nothing_fails_where_nothing_is_wrong(config: Path) -> None:
    findings = list(examine(read_config(config, ()), None, reads_files=True))
    assert {finding.status for finding in findings} == {"ok"}, findings
    names = ["arguments", "port", "disk", "placement", "checkpoint", "tokenizer", "digests", "memory"]
    assert [finding.check for finding in findings] == names and exit_status(findings) == 0
    assert failures(config, reads_files=False) == {}


def with_a_link_to_nothing(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.model").symlink_to("moved.model")


def with_two_gguf_models(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("small.gguf", "large.gguf"):
        (folder / name).touch()


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "check", "named", "remedy"),
    [
        (shutil.rmtree, "checkpoint", "ckpt cannot be read: No such file", "set ckpt_dir to"),
        (without("params.json"), "checkpoint", "params.json cannot be read: No such file", "set ckpt_dir to"),
        (without("consolidated.00.pth"), "checkpoint", "ckpt", "set ckpt_dir to"),
        (lambda folder: os.truncate(folder / "consolidated.00.pth", 1000), "checkpoint", "00.pth: damaged", "set ckpt_dir to"),
        (with_two_gguf_models, "checkpoint", "has 2 GGUF models", "set ckpt_dir to one of large.gguf, small.gguf"),
        (without("tokenizer.model"), "tokenizer", "tokenizer.model cannot be read: No such file", "set tokenizer_path"),
        (with_a_link_to_nothing, "tokenizer", "tokenizer.model cannot be read: No such file", "set tokenizer_path"),
    ],
)  # fmt: skip
def test_a_missing_or_damaged_file_is_named_with_its_remedy_by_up_and_by_its_check(
    config: Path, folder: Path, spoil: Callable[[Path], None], check: str, named: str, remedy: str
) -> None:
    spoil(folder)
    for reads_files in (False, True):
        failed = failures(config, reads_files=reads_files)
        text = str(failed[check])
        assert set(failed) == {check} and named in text and remedy in text
        assert text.count("set ") == 1 and "\n" not in text


@pytest.mark.parametrize("name", ["params.json", "consolidated.01.pth", "tokenizer.model", "."])
def test_a_file_that_this_user_may_not_read_is_named(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # not below pytest's folder, which is closed to other users
        Path(directory).chmod(0o755)
        model = Path(shutil.copytree(DEMO, Path(directory) / "model"))
        application = {"import_path": "deployments.app:build_app", "args": {"ckpt_dir": str(model)}}
        config = ConfigFile(Path(), {"http_options": {"port": free_port()}, "applications": [application]})
        assert exit_status(list(examine(config, None, reads_files=False))) == 0  # imports the formats
        (model / name).chmod(0)
        with ordinary_user():
            found = [one.found for one in examine(config, None, reads_files=False) if one.status == "fail"]
        (model / name).chmod(0o755)
        assert len(found) == 1 and found[0].startswith(str(model / name)) and "Permission denied" in found[0]


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


@pytest.mark.parametrize("name", ["consolidated.00.pth", "tokenizer.model", "params.json"])
def test_a_pointer_of_git_lfs_is_named_with_its_remedy_by_up_and_by_its_check(
    config: Path, folder: Path, name: str
) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for reads_files in (False, True):
        ((check, finding),) = failures(config, reads_files=reads_files).items()
        assert check == ("tokenizer" if "tokenizer" in name else "checkpoint") and name in str(finding)
        assert str(finding).count("git lfs pull") == 1 and "set " not in str(finding)


def test_a_disk_without_room_or_that_cannot_be_written_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace(f_bavail=10, f_frsize=2**20)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    monkeypatch.setenv("RAY_TMPDIR", str(config.parent / "sessions"))
    assert str(failures(config, reads_files=False)["disk"]) == (
        f"10.5 MB free in {config.parent}/sessions; make room there, or set RAY_TMPDIR to another directory"
    )
    monkeypatch.setenv("RAY_TMPDIR", str(config / "sessions"))
    assert failures(config)["disk"].found.startswith(f"RAY_TMPDIR: {config}/sessions cannot be made: ")


def test_a_flipped_bit_fails_the_shards_own_checksums(config: Path, folder: Path) -> None:
    shard = folder / "consolidated.00.pth"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    failed = failures(config)
    assert set(failed) == {"digests"} and "consolidated.00.pth" in failed["digests"].found


def test_a_file_that_differs_from_the_manifest_or_is_not_in_it_fails(config: Path, folder: Path) -> None:
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    assert failures(config) == {}
    (folder / "params.json").write_text((folder / "params.json").read_text() + "\n")
    failed = failures(config)
    assert set(failed) == {"digests"} and "params.json" in failed["digests"].found
    (folder / "SHA256SUMS").write_text("0" * 64 + "  params.json\n")
    assert "has no entry" in failures(config)["digests"].found


def test_a_tokenizer_of_another_model_fails(config: Path, tmp_path: Path) -> None:
    params = WIDE | {"vocab_size": 40_000}
    large = write(tmp_path / "large", split(random_weights(params, vocab_size=40_000), 1), params)
    failed = failures(config, f"ckpt_dir={large}")
    assert set(failed) == {"checkpoint"} and "belong to different models" in failed["checkpoint"].found


def test_too_many_ranks_fail_for_the_model_and_for_the_machine(config: Path) -> None:
    failed = failures(config, "model_parallel_size=9")
    assert "more than the 8 query heads" in str(failed["checkpoint"])
    assert "lower model_parallel_size" in failed["checkpoint"].remedy and "needs 9 CPUs" in failed["placement"].found
    failed = failures(config, "model_parallel_size=4", reads_files=False)
    assert set(failed) == {"placement"} and failed["placement"].found.endswith("needs 4 CPUs, this machine has 2 CPUs")


def test_more_ranks_than_gpus_fail(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "usable_cpus", lambda: 8)
    assert (
        "needs 2 GPUs, this machine has 0 GPUs" in failures(config, "device=cuda", reads_files=False)["placement"].found
    )
    monkeypatch.setattr(checks, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert failures(config, "device=cuda", reads_files=False) == {}
    for visible, count in (("", 0), ("-1", 0), ("NoDevFiles", 0), ("1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = failures(config, "device=cuda", reads_files=False)["placement"].found
        assert f"needs 2 GPUs, this machine has {count} GPU" in found
        if count == 0:
            assert placement(config, "device=auto") == "2 ranks of 4 CPU"


def placement(config: Path, *overrides: str) -> str:
    findings = examine(read_config(config, overrides), None, reads_files=False)
    return next(finding.found for finding in findings if finding.check == "placement")


def test_too_little_memory_fails_and_a_small_cache_warns(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kv_cache_bytes" in failures(config, "kv_cache_bytes=1Ti")["memory"].remedy
    monkeypatch.setattr(checks, "available_host_bytes", lambda: 10**9)
    overrides = ["max_batch_size=512", "max_seq_len=4Ki"]
    findings = list(examine(read_config(config, overrides), None, reads_files=True))
    assert [finding.check for finding in findings if finding.status == "warn"] == ["memory"]
    assert exit_status(findings) == 0
    monkeypatch.setattr(checks, "available_host_bytes", lambda: 10**8)
    failed = failures(config)
    assert set(failed) == {"memory"} and failed["memory"].found.endswith("100.0 MB free")


@pytest.mark.parametrize(
    ("setting", "status", "says"),
    [
        ("http_options.nosuch=1", 2, "http_options.nosuch: no such argument"),
        ("http_options.port=99999", 2, "http_options.port: must be a whole number from 1 to 65535"),
        ("max_sequence=5", 2, "max_sequence: no such argument; did you mean max_seq_len?"),
        ("zzz=5", 2, "zzz: no such argument; docs/configuration.md lists every argument"),
        ("max_seq_len=x", 2, "max_seq_len: must be"),
        ("max_seq_len=", 2, "max_seq_len: has no value"),
        ("max_batch_size=null", 2, "max_batch_size: must be a whole number"),
        ("max_batch_size=0", 2, "max_batch_size: must be at least 1"),
        ("drain_timeout_s=0", 2, "drain_timeout_s: must be more than 0"),
        ("device=tpu", 2, "device: must be one of 'auto', 'cpu' or 'cuda'"),
        ("verify_checksums=perhaps", 2, "verify_checksums: must be true or false"),
        ("ckpt_dir=/nowhere", 1, "/nowhere cannot be read"),
        ("http_options.port=TAKEN", 1, "127.0.0.1:TAKEN cannot be used"),
    ],
)
def test_what_cannot_be_served_ends_up_and_its_check_with_one_line(
    setting: str, status: int, says: str, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Status 2 for what is wrong with the setting itself, 1 for what is found with its help."""
    listener = socket.create_server(("127.0.0.1", 0))
    setting, says = (text.replace("TAKEN", str(listener.getsockname()[1])) for text in (setting, says))
    assert up.serve(str(config), [setting]) == status
    shown = capfd.readouterr().err
    assert shown.startswith(says) and shown.count("\n") == 1
    assert up.check(str(config), [setting]) == status
    assert says in "".join(capfd.readouterr())
    listener.close()


@pytest.mark.parametrize(
    ("address", "starts"), [(None, False), ("local", False), ("auto", True), ("10.0.0.7:6379", True)]
)
def test_up_leaves_files_and_placement_on_another_cluster_to_its_nodes(
    config: Path, address: str | None, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(up, "_run", lambda *_: begun.append("Ray"))
    monkeypatch.setattr(checks, "_check_listens", lambda cluster: None)
    monkeypatch.setattr(up, "keep_files_private", lambda: None)
    monkeypatch.setattr(process_tag, "start_watcher", lambda *_: None)
    monkeypatch.setattr(Shutdown, "start", lambda _: None)
    monkeypatch.setattr(Shutdown, "end", lambda _: sys.exit(1))
    monkeypatch.setattr(up, "_set_environment", lambda *_, **__: False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert (joined_cluster() is None) is not starts
    with pytest.raises(SystemExit, match="1"):
        sys.exit(up.serve(str(config), ["ckpt_dir=/nowhere", "model_parallel_size=9"], verbose=True))
    assert bool(begun) is starts


@pytest.mark.parametrize("reads_files", [False, True])
def test_a_cluster_that_does_not_run_is_named_at_once_by_up_and_by_its_check(config: Path, reads_files: bool) -> None:
    address = f"127.0.0.1:{free_port()}"
    found = examine(read_config(config, ()), address, reads_files=reads_files)
    failed = [finding for finding in found if finding.status == "fail"]
    assert [finding.check for finding in failed] == ["cluster"] and "unset RAY_ADDRESS" in failed[0].remedy
    assert failed[0].found == f"RAY_ADDRESS={address}: ConnectionRefusedError: [Errno 111] Connection refused"


def test_what_serve_runs_on_another_cluster_is_not_replaced_unasked(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: dict[str, object] = {"llama": None, "another": None}
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}]
    monkeypatch.setattr(checks, "_check_listens", lambda cluster: None)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=running))
    read = read_config(config, ())

    def failed(*, replaces: bool) -> list[str]:
        found = examine(read, "10.0.0.7:6379", reads_files=True, replaces=replaces)
        return [str(finding) for finding in found if finding.status == "fail"]

    assert failed(replaces=True) == []
    (line,) = failed(replaces=False)
    assert "Serve runs another, llama there" in line and "--replace" in line
    running.clear()
    assert failed(replaces=False) == []
