"""Damaged GGUF files: bytes of the header and of the weights, and lengths, counts and offsets that lie."""

import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import gguf

from llama_core.files.gguf.file import GgufFile
from tests.fuzz.damage import Damage
from tests.fuzz.json_damage import damaged
from tests.support.gguf_models import write_model

NAME = "m.gguf"
_LYING = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


@cache
def _model(encoding: gguf.GGMLQuantizationType) -> tuple[bytes, int]:
    """A small model, and the end of its header."""
    with tempfile.TemporaryDirectory() as name:
        path = write_model(Path(name), encoding=encoding, plain={"tokenizer.ggml.tokens": ["a", "b"] * 48})
        begin = min(tensor.offset for tensor in GgufFile(path).tensors.values())
        return path.read_bytes(), begin


def damages() -> dict[str, Damage]:
    """As `damage.damages`. No file of this kind has checksums."""

    def model(draw: Random) -> tuple[str, bytes, bool]:
        kinds = gguf.GGMLQuantizationType
        content, header = _model(draw.choice([kinds.F32, kinds.F16, kinds.Q8_0, kinds.Q4_1, kinds.Q6_K]))
        how = draw.random()
        if how < 0.4:
            return NAME, damaged(content, draw, 0, header), True
        if how < 0.7:
            return NAME, _lie(content, header, draw), True
        if how < 0.8:
            return NAME, content[: draw.randrange(len(content))], True
        if how < 0.85:
            return NAME, draw.choice([b"", b"GGUF", content * 2, draw.randbytes(2000), content[:header]]), True
        return NAME, damaged(content, draw), True

    return {"gguf": model}


def _lie(content: bytes, header: int, draw: Random) -> bytes:
    """Numbers of 4 or 8 bytes in the header become others."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2))):
        number = draw.choice(_LYING)
        if draw.random() < 0.5:
            struct.pack_into("<Q", data, draw.randrange(8, header - 8), number)
        else:
            struct.pack_into("<I", data, draw.randrange(4, header - 8), number % 2**32)
    return bytes(data)
