"""Writes small GGUF models with the gguf package: an independent writer, and its own quantization."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Encoding

Array = npt.NDArray[np.float32]


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    encodings: Mapping[str, Encoding] | Encoding = Encoding.F32,
    split: int = 0,
) -> Path:
    """Write one model. metadata: keys as in the file; text, numbers, truth values, and lists of them. encodings: one for all
    tensors, or by name, F32 for the others. split: tensors of one part at most, 0 for a single file. Returns the first file.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        if kind is gguf.GGUFValueType.INT32 and not isinstance(value, bool):
            kind = gguf.GGUFValueType.UINT32
        sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub)
    for name, values in tensors.items():
        encoding = encodings.get(name, Encoding.F32) if isinstance(encodings, Mapping) else encodings
        add_tensor(writer, name, values, encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return parts[0] if parts else path


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Array, encoding: Encoding) -> None:
    if values.ndim == 1 and encoding not in (Encoding.F32, Encoding.F16):
        encoding = Encoding.F32  # as llama.cpp's converter has it
    writer.add_tensor(name, encode(values, encoding), raw_dtype=encoding)


def encode(values: Array, encoding: Encoding) -> npt.NDArray[Any]:
    """The blocks of `values`, as the file holds them."""
    if encoding is Encoding.F16:
        return values.astype(np.float16)
    if encoding in _UNWRITABLE:
        return _random_blocks(values.shape, encoding)
    blocks: npt.NDArray[Any] = gguf.quants.quantize(values, encoding)
    return blocks


# Encodings that the gguf package reads but cannot write: a block of random bytes stands for random weights.
_UNWRITABLE = {
    Encoding.Q2_K: (80, 82), Encoding.Q3_K: (108,), Encoding.Q4_K: (0, 2), Encoding.Q5_K: (0, 2), Encoding.Q6_K: (208,),
    Encoding.IQ4_NL: (0,), Encoding.IQ4_XS: (0,),
}  # fmt: skip


def _random_blocks(shape: tuple[int, ...], encoding: Encoding) -> npt.NDArray[np.uint8]:
    """Random blocks whose float16 scales, at the bytes that the table above gives, are finite and small."""
    values, size = gguf.GGML_QUANT_SIZES[encoding]
    draw = np.random.default_rng(int(np.prod(shape)))
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    for at in _UNWRITABLE[encoding]:
        scales = draw.normal(scale=1e-3, size=blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
