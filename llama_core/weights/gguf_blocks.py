"""The blocks of GGUF's encodings as codes, scales and minima (ggml/src/ggml-common.h has the structs of these blocks)."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from llama_core.weights.loader import GroupedWeight

_E8M0_BIAS: Final = 127


class _Blocks:
    """uint8 [rows, blocks, bytes of a block], read by the offsets of fields."""

    def __init__(self, stored: torch.Tensor, num_bytes: int) -> None:
        """stored: [rows, bytes] of whole blocks."""
        self._bytes = stored.view(len(stored), -1, num_bytes)

    def bytes(self, begin: int, end: int | None = None) -> torch.Tensor:
        return self._bytes[..., begin:end]

    def half(self, begin: int) -> torch.Tensor:
        """float32 [rows, blocks]."""
        return self.bytes(begin, begin + 2).contiguous().view(torch.float16).squeeze(-1).float()

    def nibbles(self, begin: int, width: int) -> torch.Tensor:
        """uint8 [rows, blocks, codes], from there to the block's end. Of each `width` bytes, the low halves come first."""
        packed = torch.unflatten(self.bytes(begin), -1, (-1, width))
        return torch.cat((packed & 15, packed >> 4), dim=-1).flatten(-2)

    def bits(self, begin: int, end: int, width: int) -> torch.Tensor:
        """uint8 [rows, blocks, fields, bytes]: the fields of `width` bits in each byte, the lowest first."""
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)
        return self.bytes(begin, end).unsqueeze(-2) >> shifts[:, None] & ((1 << width) - 1)


def _weight(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> GroupedWeight:
    return GroupedWeight(codes.flatten(1), scales.flatten(1), None if minima is None else minima.flatten(1))


def _q8_0(blocks: _Blocks) -> GroupedWeight:
    return _weight(blocks.bytes(2).contiguous().view(torch.int8), blocks.half(0))


def _q4_0(blocks: _Blocks) -> GroupedWeight:
    return _weight(blocks.nibbles(2, 16), blocks.half(0))


def _q4_1(blocks: _Blocks) -> GroupedWeight:
    return _weight(blocks.nibbles(4, 16), blocks.half(0), blocks.half(2))


def _fifth_bits(blocks: _Blocks, begin: int) -> torch.Tensor:
    """uint8 [rows, blocks, 32], 16 or 0: bit i belongs to code i."""
    return blocks.bits(begin, begin + 4, 1).transpose(-1, -2).flatten(-2) << 4


def _q5_0(blocks: _Blocks) -> GroupedWeight:
    return _weight(blocks.nibbles(6, 16) | _fifth_bits(blocks, 2), blocks.half(0))


def _q5_1(blocks: _Blocks) -> GroupedWeight:
    return _weight(blocks.nibbles(8, 16) | _fifth_bits(blocks, 4), blocks.half(0), blocks.half(2))


def _scales_and_minima(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, blocks, 8] of a k-quant, from two float16 and 8 pairs of 6 bits in 12 bytes."""
    first, second, third = torch.unflatten(blocks.bytes(4, 16), -1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return blocks.half(0).unsqueeze(-1) * scales.float(), -(blocks.half(2).unsqueeze(-1) * minima.float())


def _q4_k(blocks: _Blocks) -> GroupedWeight:
    return _weight(blocks.nibbles(16, 32), *_scales_and_minima(blocks))


def _q5_k(blocks: _Blocks) -> GroupedWeight:
    fifth = blocks.bits(16, 48, 1).flatten(-2) << 4  # bit j of byte i belongs to code 32 j + i
    return _weight(blocks.nibbles(48, 32) | fifth, *_scales_and_minima(blocks))


def _q6_k(blocks: _Blocks) -> GroupedWeight:
    low = torch.unflatten(blocks.bytes(0, 128), -1, (2, 64))
    low = torch.cat((low & 15, low >> 4), dim=-1)  # [rows, blocks, 2, 128]
    upper = torch.stack((blocks.bits(128, 160, 2), blocks.bits(160, 192, 2)), dim=-3).flatten(-2)
    scales = blocks.bytes(192, 208).contiguous().view(torch.int8).float() * blocks.half(208).unsqueeze(-1)
    return _weight((low | upper << 4).flatten(-2), scales)


def _iq4_xs(blocks: _Blocks) -> GroupedWeight:
    low = blocks.bits(4, 8, 4).transpose(-1, -2).flatten(-2)
    upper = blocks.bits(2, 4, 2).transpose(-1, -2).flatten(-2)
    scales = blocks.half(0).unsqueeze(-1) * ((low | upper << 4).float() - 32)
    return _weight(blocks.nibbles(8, 16), scales)


def _mxfp4(blocks: _Blocks) -> GroupedWeight:
    exponents = blocks.bytes(0, 1).float() - _E8M0_BIAS - 1  # codes stand for twice the values
    return _weight(blocks.nibbles(1, 16), exponents.exp2().squeeze(-1))


class Stored(NamedTuple):
    """coding: one of `weight_formats.CODINGS` with the same values."""

    coding: str
    read: Callable[[_Blocks], GroupedWeight]


# By the encoding's name.
STORED: Final[Mapping[str, Stored]] = {
    "Q8_0": Stored("int8_groups", _q8_0),
    "Q4_0": Stored("int4", _q4_0),
    "Q4_1": Stored("int4_min", _q4_1),
    "Q5_0": Stored("q5_0", _q5_0),
    "Q5_1": Stored("q5_1", _q5_1),
    "Q4_K": Stored("q4_k", _q4_k),
    "Q5_K": Stored("q5_k", _q5_k),
    "Q6_K": Stored("q6_k", _q6_k),
    "IQ4_NL": Stored("iq4_nl", _q4_0),
    "IQ4_XS": Stored("iq4_xs", _iq4_xs),
    "MXFP4": Stored("mxfp4", _mxfp4),
}


def groups(encoding: str, num_bytes: int, stored: torch.Tensor) -> GroupedWeight:
    """stored: uint8 [rows, bytes] of whole blocks of num_bytes of an encoding in STORED."""
    return STORED[encoding].read(_Blocks(stored, num_bytes))
