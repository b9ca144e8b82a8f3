"""The header of a GGUF file, written by the gguf package or by hand, is read as it is or refused by name."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llama_core.errors import CheckpointError
from llama_core.files.gguf.file import GgufFile
from tests.support.gguf_models import write_gguf

METADATA = {
    "text": "naïve 🦙",
    "whole": 7,
    "real": 0.5,
    "flag": True,
    "words": ["a", "", "日本"],
    "numbers": [1, -2, 3],
    "reals": [0.5, -1.0],
}


def _model(tmp_path: Path) -> Path:
    tensors = {"one": np.ones((4, 32), np.float32), "two": np.arange(5, dtype=np.float32)}
    return write_gguf(tmp_path / "m.gguf", "llama", METADATA, tensors)


def test_metadata_and_tensors_are_what_was_written(tmp_path: Path) -> None:
    path = _model(tmp_path)
    file = GgufFile(path)
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    assert file.metadata["general.architecture"] == "llama"
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"one": (4, 32), "two": (5,)}
    two = file.tensors["two"]
    assert path.read_bytes()[two.offset : two.offset + two.num_bytes] == np.arange(5, dtype="<f4").tobytes()


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _file(path: Path, keys: list[bytes], tensors: list[bytes], data: int = 256, version: int = 3) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    path.write_bytes(header + bytes(-len(header) % 32 + data))
    return path


def _tensor(name: bytes = b"w", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


FLAG = _text(b"flag") + struct.pack("<I?", 7, True)
LYING = {
    "there twice": ([FLAG, FLAG], []),
    "type 13, which is unknown": ([_text(b"flag") + struct.pack("<I", 13)], []),
    "more than 16777216": ([_text(b"a") + struct.pack("<IIQ", 9, 0, 2**62)], []),
    "more than 2097152 strings, with 'b'": (
        [_text(b"a") + struct.pack("<IIQ", 9, 8, 1) + _text(b""), _text(b"b") + struct.pack("<IIQ", 9, 8, 2**21)],
        [],
    ),
    "array of type 9": ([_text(b"a") + struct.pack("<IIQ", 9, 9, 1)], []),
    "ends inside its header": ([_text(b"a") + struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1)], []),
    "more than 65536": ([struct.pack("<Q", 2**63)], []),
    "not UTF-8": ([_text(b"\xff")], []),
    "power of two": ([_text(b"general.alignment") + struct.pack("<II", 4, 48)], []),
    "tensor 'w' is there twice": ([], [_tensor(), _tensor()]),
    "overlaps": ([], [_tensor(), _tensor(b"v", offset=96)]),
    "not aligned": ([], [_tensor(offset=16)]),
    "outside the file": ([], [_tensor(dims=(96,))]),
    "lies outside": ([], [_tensor(offset=2**63)]),
    "0 dimensions": ([], [_tensor(dims=())]),
    "9 dimensions": ([], [_tensor(dims=(1,) * 9)]),
    r"shape \[31\] in Q4_0": ([], [_tensor(dims=(31,), kind=2)]),
    r"shape \[0, 32\]": ([], [_tensor(dims=(32, 0))]),
    "IQ2_XXS, which is not supported": ([], [_tensor(dims=(256,), kind=16)]),
    "number 77": ([], [_tensor(kind=77)]),
    "file of": ([], [_tensor(dims=(2**62, 2**62))]),
}


@pytest.mark.parametrize("message", LYING)
def test_a_header_that_lies_is_refused_by_name(tmp_path: Path, message: str) -> None:
    keys, tensors = LYING[message]
    with pytest.raises(CheckpointError, match=message) as refused:
        GgufFile(_file(tmp_path / "m.gguf", keys, tensors))
    assert "m.gguf" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "1099511627776 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "1099511627776 metadata keys"),
    ],
)
def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_a_large_array_takes_no_memory_before_it_is_read(tmp_path: Path) -> None:
    array = _text(b"a") + struct.pack("<IIQ", 9, 5, 2**20) + bytes(2**22)
    path = _file(tmp_path / "m.gguf", [array], [])
    tracemalloc.start()
    file = GgufFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    values = file.metadata["a"]
    assert isinstance(values, list) and len(values) == 2**20
