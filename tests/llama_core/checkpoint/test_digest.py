"""The digest of a checkpoint's contents is what sha256sum prints."""

import subprocess
from pathlib import Path

import pytest

from llama_core.errors import CheckpointError
from llama_core.files.digest import CheckpointDigest, sha256_of, sha256_of_each


def test_digest_value_is_the_sha256_of_what_sha256sum_prints(tmp_path: Path) -> None:
    files = [tmp_path / "params.json", tmp_path / "consolidated.00.pth"]
    for file in files:
        file.write_bytes(file.name.encode() * 100_000)
    command = "sha256sum params.json consolidated.00.pth | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    digests = sha256_of_each(files, num_threads=2)
    digest = CheckpointDigest(tuple((file.name, sha256) for file, sha256 in zip(files, digests, strict=True)))
    assert digest.value == printed.split()[0]


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.pth: cannot be read: No such file"):
        sha256_of(tmp_path / "absent.pth")
