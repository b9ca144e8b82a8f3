"""The configuration that `llama-ray up MODEL` makes, and what it chooses for the machine."""

from pathlib import Path

import pytest

from deployments.args import ServerArgs
from deployments.local import model_argument
from deployments.local.model_argument import fault_of_argument, fewest_ranks, is_config, read_argument, shadowed
from deployments.local.up import prepared
from llama_core.errors import ConfigError
from tests.support import hugging_face
from tests.support.programs import REPOSITORY


@pytest.mark.parametrize(
    ("argument", "model_id"),
    [
        ("org/Name-8B", "Name-8B"),
        ("org/Name-GGUF:Q4_0", "Name"),
        ("s3://bucket/models/Name", "Name"),
        ("demo", "demo"),
        ("/models/Name-8B/", "Name-8B"),
        ("/models/name.Q4_0.gguf", "name.Q4_0"),
    ],
)
def test_a_model_becomes_an_application(argument: str, model_id: str) -> None:
    config = read_argument(argument, ["http_options.port=9000", "max_batch_size=4"])
    args = config.server_args
    assert args is not None and (args.model_id, args.ckpt_dir, args.max_batch_size) == (model_id, argument, 4)
    assert (config.host, config.port, config.is_made) == ("127.0.0.1", 9000, True)


def test_a_configuration_file_stays_what_it_is() -> None:
    config = read_argument(str(REPOSITORY / "serve_config.yaml"), [])
    assert not config.is_made and config.model == "llama-demo" and prepared(config) is config


def test_what_can_be_neither_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").write_text("applications: []")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert [is_config(each) for each in ("x.yaml", "config", "x.gguf", "org/name", "demo")] == [
        True,
        True,
        *[False] * 3,
    ]
    names = ("org/name", "org/other", "demo", "config", "s3://b/x", "https://h/x.gguf")
    assert [fault_of_argument(each) for each in names] == [None] * 6
    assert fault_of_argument("absent.yaml") == "file 'absent.yaml' does not exist"
    assert "not a model's name of the form org/name" in str(fault_of_argument("absent"))
    assert "hf://org/name is the hub's" in str(shadowed("org/name"))
    assert [shadowed(each) for each in ("org/other", "demo", "config", str(tmp_path))] == [None] * 4


def test_the_fewest_gpus_that_hold_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hugging_face.CONFIGS["llama2"] | {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
    hugging_face.write(tmp_path, model, hugging_face.random_weights(hugging_face.read(model)), 1)
    (tmp_path / "tokenizer.model").write_bytes((REPOSITORY / "demo" / "tokenizer.model").read_bytes())
    args = ServerArgs(ckpt_dir=str(tmp_path), max_batch_size=2, max_seq_len=64, dtype="float32")

    def ranks(*gpu_megabytes: int) -> int:
        monkeypatch.setattr(model_argument, "gpu_bytes", lambda: [each * 10**6 for each in gpu_megabytes])
        return fewest_ranks(args)

    assert ranks() == 1, "a machine without GPUs"
    found = [ranks(*[megabytes] * 8) for megabytes in (1000, 600, 500)]
    assert found[0] == 1 < found[1] < found[2] <= 8
    with pytest.raises(ConfigError, match="does not fit on 1 GPUs"):
        ranks(500)


def test_nvidia_smi_tells_the_memory_of_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=1) echo 81559;; *) echo 81559; echo 81559;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert model_argument.gpu_bytes() == [81559 * 2**20] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert model_argument.gpu_bytes() == [81559 * 2**20]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert model_argument.gpu_bytes() == []
