"""SHA256SUMS beside a checkpoint or elsewhere: no file is parsed unless every file has the listed SHA-256."""

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama
from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.checkpoint.meta import MetaCheckpoint
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointError, ConfigError
from llama_core.files.digest import CheckpointDigest, sha256_of_each
from llama_core.files.manifest import FILE_NAME, Manifest
from tests.support.checkpoints import WIDE, random_weights, split, write

SHARDS = ["consolidated.00.pth", "consolidated.01.pth"]
NAMES = [*SHARDS, "params.json", "tokenizer.model"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "model", split(random_weights(WIDE), 2))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(directory: Path, *names: str) -> str:
    return "".join(f"{digest(directory / name)}  {name}\n" for name in names or NAMES)


def build(checkpoint: Path, manifest: Path | None = None, tokenizer: Path | None = None) -> Llama:
    path = tokenizer or checkpoint / "tokenizer.model"
    return Llama.build(checkpoint, path, 32, 2, device="cpu", backend="torch", sha256_manifest=manifest)


def change(path: Path) -> None:
    """Flip one bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_manifest_written_by_sha256sum_is_accepted(checkpoint: Path) -> None:
    command = f"sha256sum consolidated.*.pth params.json tokenizer.model > {FILE_NAME}"
    subprocess.run(command, shell=True, cwd=checkpoint, check=True)
    manifest = Manifest.find(checkpoint)
    assert manifest is not None
    manifest.check_complete(MetaCheckpoint(checkpoint))
    build(checkpoint)


def test_a_digest_is_the_sha256_of_what_sha256sum_prints(checkpoint: Path) -> None:
    command = f"sha256sum {' '.join(NAMES)} | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=checkpoint, check=True, capture_output=True, text=True).stdout
    digests = sha256_of_each([checkpoint / name for name in NAMES], num_threads=2)
    assert CheckpointDigest(tuple(zip(NAMES, digests, strict=True))).value == printed.split()[0]


def test_a_manifest_is_optional_unless_it_is_configured(checkpoint: Path) -> None:
    assert Manifest.find(checkpoint) is None
    with pytest.raises(CheckpointError, match=r"elsewhere/SUMS: cannot be read: No such file"):
        build(checkpoint, checkpoint / "elsewhere" / "SUMS")


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_or_missing_file_is_named_before_any_shard_is_opened(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*args: Any, **options: Any) -> None:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(torch, "load", opened)
    (checkpoint / FILE_NAME).write_text(sums(checkpoint))
    change(checkpoint / name)
    with pytest.raises(CheckpointError, match=rf"{name}: its SHA-256 is [0-9a-f]{{64}}, .*{FILE_NAME} says [0-9a-f]"):
        build(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises((CheckpointError, ConfigError), match=name):
        build(checkpoint)


def test_names_in_a_manifest_elsewhere_are_relative_to_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The manifest lies outside the checkpoint's directory, and the tokenizer one level up, as in Meta's releases."""
    shutil.move(checkpoint / "tokenizer.model", tmp_path / "tokenizer.model")
    manifest = tmp_path / "etc" / "llama.sha256"
    manifest.parent.mkdir()
    manifest.write_text("# of llama\n\n" + sums(checkpoint, *SHARDS, "params.json", "../tokenizer.model"))
    build(checkpoint, manifest, tmp_path / "tokenizer.model")
    change(tmp_path / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: its SHA-256 is"):
        build(checkpoint, manifest, tmp_path / "tokenizer.model")


@pytest.mark.parametrize(("encoding", "end"), [("utf-8", "\n"), ("utf-8-sig", "\r\n")], ids=["usual", "another editor"])
def test_every_line_format_of_sha256sum_is_read(tmp_path: Path, encoding: str, end: str) -> None:
    a, b, c = ("1" * 64, "2" * 64, "AB" * 32)
    lines = [f"{a} *binary", f"\\{b}  back\\\\slash\\nand line", "", "# a remark", f"{c}  /elsewhere/x", f"{a}  binary"]
    (tmp_path / FILE_NAME).write_bytes(end.join(lines).encode(encoding))
    digests = Manifest.read(tmp_path / FILE_NAME, tmp_path).digests
    assert digests == {
        str(tmp_path / "binary"): a,
        str(tmp_path / "back\\slash\nand line"): b,
        "/elsewhere/x": c.lower(),
    }


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"12ab  params.json\n", "line 1 is not in the format of sha256sum"),
        (b"\n" + b"1" * 64 + b"\n", "line 2 is not in the format of sha256sum"),
        (b"1" * 64 + b"  x\n" + b"2" * 64 + b"  ./x\n", "line 2 contradicts another one"),
        (b"\xff", "is not text"),
        ("0".encode("utf-16"), "cannot be read: not text in UTF-8"),
        (b" " * (16 * 2**20 + 1), "has more than 16777216 bytes"),
    ],
    ids=["short", "nameless", "contradiction", "binary", "utf-16", "huge"],
)
def test_an_invalid_manifest_is_refused(checkpoint: Path, content: bytes, fault: str) -> None:
    (checkpoint / FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{FILE_NAME}: {fault}"):
        build(checkpoint)


def test_a_rank_uses_the_manifest_that_was_read_at_the_start(checkpoint: Path) -> None:
    (checkpoint / FILE_NAME).write_text(sums(checkpoint))
    config = EngineConfig(str(checkpoint), 640, 32, 2, device="cpu", manifest=Manifest.find(checkpoint))
    change(checkpoint / SHARDS[0])
    (checkpoint / FILE_NAME).write_text(sums(checkpoint))
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]}: its SHA-256 is"):
        ModelRunner.load(config, alone("cpu"))
