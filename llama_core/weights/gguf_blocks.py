"""Decodes the blocks of GGUF encodings, in torch. The gguf package decodes the encodings that are not here."""

from typing import Final, NamedTuple

import torch

from llama_core.files.gguf.types import Encoding
from llama_core.files.source import GROUP

# Encoding -> the weight format of the same values (see `source.GroupedSlice`).
GROUPED: Final = {"Q8_0": "int8_groups", "Q4_0": "int4", "Q4_1": "int4_min"}
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Groups(NamedTuple):
    """codes [rows, columns], scales and minima float32 [rows, columns / GROUP]; see `source.GroupedSlice`."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None


def plain_dtype(encoding: Encoding) -> torch.dtype | None:
    """The dtype of an encoding without blocks, None for the others."""
    return _PLAIN.get(encoding.name)


def decode(encoding: Encoding, stored: torch.Tensor) -> torch.Tensor:
    """stored: uint8 [rows, bytes] of whole blocks -> [rows, columns], float32 unless the encoding is a plain dtype."""
    dtype = plain_dtype(encoding)
    if dtype is not None:
        return stored.clone(memory_format=torch.contiguous_format).view(dtype)  # a file may hold it at any byte
    if encoding.name in GROUPED:
        return _dense(encoding, groups(encoding, stored))
    import gguf  # takes 0.3 s, which files of other encodings need not wait for

    kind = gguf.GGMLQuantizationType[encoding.name]
    return torch.from_numpy(gguf.quants.dequantize(stored.contiguous().numpy(), kind))


def groups(encoding: Encoding, stored: torch.Tensor) -> Groups:
    """stored: uint8 [rows, bytes] of whole blocks of an encoding in GROUPED."""
    blocks = stored.view(len(stored), -1, encoding.num_bytes)
    scales = _half(blocks[..., 0:2])
    if encoding.name == "Q8_0":
        codes = blocks[..., 2:].contiguous().view(torch.int8)
        return Groups(codes.flatten(1), scales, None)
    if encoding.name == "Q4_0":
        return Groups(_nibbles(blocks[..., 2:]), scales, None)
    assert encoding.name == "Q4_1"
    return Groups(_nibbles(blocks[..., 4:]), scales, _half(blocks[..., 2:4]))


def _half(stored: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, blocks, 2] -> float32 [rows, blocks]."""
    return stored.contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, blocks, 16] -> uint8 [rows, columns]: the low halves of a block come first."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)


def _dense(encoding: Encoding, parts: Groups) -> torch.Tensor:
    values = parts.codes.view(len(parts.codes), -1, GROUP).float()
    if encoding.name == "Q4_0":
        values -= 8
    values *= parts.scales.unsqueeze(-1)
    if parts.minima is not None:
        values += parts.minima.unsqueeze(-1)
    return values.flatten(1)
