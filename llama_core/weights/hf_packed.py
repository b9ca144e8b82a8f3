"""Packed weights in safetensors files, as compressed-tensors' "pack-quantized" stores a linear layer [n, k]:

weight_packed, int32 [n, k * bits / 32], holds codes plus 2^(bits - 1), the first code in the lowest bits. So its bytes hold two
codes of 4 bits each, the low half first, or one of 8 bits. weight_scale [n, k / GROUP] has a scale for each group of inputs.
weight_shape is [n, k]. A weight is code * scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from llama_core.files.hf.files import Located
from llama_core.files.json_fields import shown
from llama_core.files.source import GROUP

SCALE_DTYPES: Final = ("BF16", "F16", "F32")
_PARTS = ("packed", "scale", "shape")


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """The tensors of one linear layer, and the bits of a code."""

    packed: Located
    scale: Located
    shape: Located
    bits: int


def part_names(weight: str) -> dict[str, str]:
    """The names in the files of the parts of a packed weight. weight: its name if it were dense."""
    return {part: f"{weight}_{part}" for part in _PARTS}


def find_packed(
    weight: str, shape: tuple[int, ...], bits: int, located: Mapping[str, Located]
) -> tuple[PackedTensors | None, list[str]]:
    """The parts of a packed weight, or what is wrong with their headers. shape: of the weight."""
    names = part_names(weight)
    if missing := [name for name in names.values() if name not in located]:
        return None, [f"{name} is missing" for name in missing]
    rows, columns = shape
    if columns % GROUP:
        return None, [f"{names['packed']} has {columns} inputs, no multiple of {GROUP}"]
    expected = {
        "packed": ((rows, columns * bits // 32), ("I32",)),
        "scale": ((rows, columns // GROUP), SCALE_DTYPES),
        "shape": ((2,), ("I64", "I32")),
    }
    faults = []
    for part, (size, dtypes) in expected.items():
        tensor = located[names[part]]
        if tensor.shape != size:
            faults.append(f"{names[part]} has shape {shown(list(tensor.shape))}, expected {list(size)}")
        elif tensor.dtype not in dtypes:
            faults.append(f"{names[part]} has dtype {tensor.dtype}, expected {' or '.join(dtypes)}")
    packed, scale, said = (located[names[part]] for part in _PARTS)
    found = PackedTensors(packed, scale, said, bits)
    return (None, faults) if faults else (found, [])


def unpack(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of weight_packed, uint8 [n, k * bits / 8] -> codes [n, k] of a `GroupedSlice`; allocates."""
    if bits == 8:
        return (stored ^ 128).view(torch.int8)
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [n, k], scales float32 [n, k / GROUP] -> float32 [n, k]."""
    values = codes.view(len(codes), -1, GROUP).float()
    if bits == 4:
        values -= 8
    return (values * scales.unsqueeze(-1)).flatten(1)


def is_exact_in_half(scales: torch.Tensor) -> bool:
    """Whether float16 holds every scale exactly, as the weight formats need. False for NaN."""
    return bool((scales.float() == scales.half().float()).all())
