"""`llama-ray doctor`: each fault is provoked, and named with its remedy."""

import hashlib
import json
import resource
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.programs import free_port
from cli.doctor.command import examine
from cli.doctor.findings import Finding, Status
from cli.doctor.machine import Machine
from llama_core.execution.native import build
from tests.cli.conftest import llama_ray, on_one_line
from tests.support import hugging_face
from tests.support.checkpoints import WIDE, random_weights, split, write

FEW_CPUS = Machine(num_cpus=2, num_gpus=0, open_files=65536, environment={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with its tokenizer."""
    return write(tmp_path / "ckpt", split(random_weights(WIDE), 1))


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> Path:
    """A configuration that works here."""
    args = {"ckpt_dir": str(folder), "model_parallel_size": 2, "max_seq_len": 256, "device": "cpu"}
    content = {
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [{"name": "llama", "args": args}],
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def failures(config: Path, overrides: Sequence[str] = (), machine: Machine = FEW_CPUS) -> dict[str, Finding]:
    """The failed checks by name, each with a remedy."""
    failed = [finding for finding in examine(config, overrides, machine) if finding.status is Status.FAIL]
    assert all(finding.remedy for finding in failed)
    return {finding.check: finding for finding in failed}


def machine(**facts: Any) -> Machine:
    """This machine as far as `FEW_CPUS` does not say otherwise, with other facts."""
    return replace(FEW_CPUS, **facts)


def test_nothing_fails_where_nothing_is_wrong(config: Path) -> None:
    findings = examine(config, (), FEW_CPUS)
    assert {finding.status for finding in findings} == {Status.OK}, findings
    assert [finding.check for finding in findings] == [
        *(
            "Python",
            "Ray",
            "HAProxy",
            "open files",
            "/dev/shm",
            "port",
            "arguments",
            "C++ compiler",
            "GPUs",
            "placement",
        ),
        *("checkpoint", "tokenizer", "digests", "memory"),
    ]


def test_a_taken_port(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        failed = failures(config, [f"http_options.port={port}"])
    assert set(failed) == {"port"} and f"127.0.0.1:{port} cannot be used" in failed["port"].have


def test_a_misspelt_argument_and_a_wrong_value(config: Path) -> None:
    failed = failures(config, ["max_batchsize=4"])
    assert set(failed) == {"arguments"} and "max_batchsize" in failed["arguments"].have
    assert failed["arguments"].remedy == "did you mean max_batch_size?"
    failed = failures(config, ["kv_cache_bytes=4x"])
    assert failed["arguments"].need.startswith("kv_cache_bytes") and "4x" not in failed["arguments"].have


def test_digests_are_not_called_right_where_none_was_read(config: Path) -> None:
    for overrides in (["ckpt_dir=/nowhere"], ["verify_checksums=false"]):
        (digests,) = [one for one in examine(config, overrides, FEW_CPUS) if one.check == "digests"]
        assert digests.status is Status.SKIP, overrides


def test_a_truncated_shard(config: Path, folder: Path) -> None:
    shard = folder / "consolidated.00.pth"
    shard.write_bytes(shard.read_bytes()[:-5000])
    failed = failures(config)
    assert "consolidated.00.pth" in failed["checkpoint"].have and "download" in failed["checkpoint"].remedy


def test_a_missing_file(config: Path, folder: Path) -> None:
    (folder / "params.json").unlink()
    assert "params.json" in failures(config)["checkpoint"].have
    shutil.rmtree(folder)
    assert str(folder) in failures(config)["checkpoint"].have


def test_a_missing_tokenizer(config: Path, folder: Path) -> None:
    (folder / "tokenizer.model").unlink()
    failed = failures(config)
    assert "tokenizer.model" in failed["tokenizer"].have and "tokenizer_path" in failed["tokenizer"].remedy


def test_a_digest_that_differs(config: Path, folder: Path) -> None:
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    assert failures(config) == {}
    params = folder / "params.json"
    params.write_text(params.read_text() + "\n")
    failed = failures(config)
    assert (
        set(failed) == {"digests"} and "params.json" in failed["digests"].have and "SHA-256" in failed["digests"].have
    )


def test_a_flipped_bit_in_a_shard_without_a_manifest(config: Path, folder: Path) -> None:
    shard = folder / "consolidated.00.pth"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    failed = failures(config)
    assert set(failed) == {"digests"} and "consolidated.00.pth" in failed["digests"].have


def test_a_file_that_the_manifest_lacks(config: Path, folder: Path) -> None:
    (folder / "SHA256SUMS").write_text("0" * 64 + "  params.json\n")
    assert "has no entry" in failures(config)["digests"].have


def test_too_many_ranks_for_the_model_and_for_the_machine(config: Path) -> None:
    failed = failures(config, ["model_parallel_size=9"])
    assert "more than the 8 query heads" in failed["checkpoint"].have and "needs 9 CPUs" in failed["placement"].have
    failed = failures(config, ["model_parallel_size=4"])
    assert set(failed) == {"placement"} and failed["placement"].have == "needs 4 CPUs, this machine has 2 CPUs"


def test_more_gpus_than_there_are(config: Path) -> None:
    failed = failures(config, ["device=cuda"], machine(num_gpus=1))
    assert (failed["GPUs"].have, failed["GPUs"].need) == ("1", "2, one for each rank")
    assert "GPUs" not in failures(config, ["device=cuda"], machine(num_gpus=2))


def test_too_little_memory(config: Path) -> None:
    failed = failures(config, machine=machine(free_bytes=10**8))
    assert set(failed) == {"memory"} and failed["memory"].have == "100.0 MB free"
    failed = failures(config, ["kv_cache_bytes=1Ti"])
    assert set(failed) == {"memory"} and "kv_cache_bytes" in failed["memory"].remedy


def test_a_cache_that_holds_few_full_sequences_is_a_warning(config: Path) -> None:
    findings = examine(config, ["max_batch_size=512", "max_seq_len=4Ki"], machine(free_bytes=10**9))
    assert [finding.check for finding in findings if finding.status is Status.WARN] == ["memory"]


def test_a_tokenizer_of_another_vocabulary(config: Path, folder: Path, tmp_path: Path) -> None:
    params = WIDE | {"vocab_size": 40_000}
    large = write(tmp_path / "large", split(random_weights(params, vocab_size=40_000), 1), params)
    failed = failures(config, [f"ckpt_dir={large}"])
    assert (
        set(failed) == {"checkpoint"}
        and "tokenizer and checkpoint belong to different models" in failed["checkpoint"].have
    )
    assert "tokenizer_path" in failed["checkpoint"].remedy
    # The rows of the embedding are 640 here, and the demo's tokenizer has 1,280 tokens.
    failed = failures(config, ["tokenizer_path=demo/tokenizer.model"])
    assert set(failed) == {"checkpoint"} and "tok_embeddings.weight" in failed["checkpoint"].have
    # A Hugging Face checkpoint may have more rows than its tokenizer has tokens, but not so many.
    shape = hugging_face.CONFIGS["llama2"] | {"vocab_size": 5000}
    wide = hugging_face.write(tmp_path / "hugging_face", shape, hugging_face.random_weights(hugging_face.read(shape)))
    shutil.copyfile(folder / "tokenizer.model", wide / "tokenizer.model")
    tokenizer = folder / "tokenizer.model"
    failed = failures(config, [f"ckpt_dir={wide}", f"tokenizer_path={tokenizer}"])
    assert set(failed) == {"tokenizer"} and "5,000 rows" in failed["tokenizer"].have


def test_too_small_shared_memory(config: Path) -> None:
    failed = failures(config, machine=machine(shm=Path("/proc")))  # a file system without room
    assert set(failed) == {"/dev/shm"} and "--shm-size" in failed["/dev/shm"].remedy
    assert set(failures(config, machine=machine(shm=Path("/absent")))) == {"/dev/shm"}


@pytest.mark.parametrize(("version", "have"), [("2.55.1", "2.55.1"), ("2.6.0", "2.6.0"), (None, "not installed")])
def test_another_version_of_ray(config: Path, version: str | None, have: str) -> None:
    failed = failures(config, machine=machine(ray_version=version))
    assert set(failed) == {"Ray"} and failed["Ray"].have == have


def test_an_old_python(config: Path) -> None:
    assert set(failures(config, machine=machine(python=(3, 10, 4)))) == {"Python"}


def test_too_few_open_files(config: Path) -> None:
    failed = failures(config, machine=machine(open_files=256))
    assert set(failed) == {"open files"} and "ulimit -n" in failed["open files"].remedy
    assert failed["open files"].have == "256"
    unlimited = machine(open_files=resource.RLIM_INFINITY)
    (found,) = [one for one in examine(config, (), unlimited) if one.check == "open files"]
    assert (found.status, found.have) == (Status.OK, "no limit")


def test_no_haproxy(config: Path, tmp_path: Path) -> None:
    failed = failures(config, machine=machine(environment={"LLAMA_HAPROXY_BINARY": str(tmp_path / "absent")}))
    assert set(failed) == {"HAProxy"}
    off = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "LLAMA_HAPROXY_BINARY": str(tmp_path / "absent")}
    assert failures(config, machine=machine(environment=off)) == {}


def test_no_compiler(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CXX", "false")
    monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / "cache"))
    build.library_path.cache_clear()
    try:
        status = {finding.check: finding.status for finding in examine(config, (), FEW_CPUS)}
        assert status["C++ compiler"] is Status.WARN
        assert "LLAMA_CXX" in failures(config, ["backend=native"])["C++ compiler"].remedy
    finally:
        build.library_path.cache_clear()


def test_a_cluster_that_does_not_run(config: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    failed = failures(config, machine=machine(environment={"RAY_ADDRESS": address}))
    assert set(failed) == {"placement"} and "RAY_ADDRESS" in failed["placement"].remedy


def test_the_command_prints_the_remedies_and_ends_with_status_one(config: Path) -> None:
    done = llama_ray("doctor", str(config), "cpus_per_rank=0.5", "max_batchsize=4")
    assert done.returncode == 1 and "did you mean max_batch_size?" in on_one_line(done.stdout)
    done = llama_ray("doctor", str(config), "cpus_per_rank=0.5", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == int(any(one["status"] == "fail" for one in found))
    assert {one["check"] for one in found} >= {"port", "checkpoint", "tokenizer", "digests", "memory", "placement"}


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("just: text")
    assert "no list of applications" in failures(path)["configuration"].have
