"""Quantizes dense weights in torch: groups by the rules of llama.cpp's Q8_0, Q4_0 and Q4_1, or one scale for each output."""

from typing import Final

import torch

from llama_core.files.source import GROUP
from llama_core.weights.loader import GroupedWeight

_FP8_MAX: Final = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantize_groups(weight: torch.Tensor, name: str) -> GroupedWeight:
    """weight [n, k] in the format `name` of groups; k is a multiple of GROUP. Scales and minima are exact in float16."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    if name == "int8_groups":
        step = groups.abs().amax(-1) / 127
        return GroupedWeight(_nearest(groups * _inverse(step)).to(torch.int8).flatten(1), _half(step), None)
    if name == "int4":
        # The value of the largest magnitude has the code 0, so that it is exact; the sign of the scale is its opposite.
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        step = extreme / -8
        return GroupedWeight(_to_nibbles(groups * _inverse(step) + 8), _half(step), None)
    assert name == "int4_min", name
    least, greatest = groups.aminmax(dim=-1)
    step = (greatest - least) / 15
    return GroupedWeight(_to_nibbles((groups - least[..., None]) * _inverse(step)), _half(step), _half(least))


def quantize_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> int8 [n, k] and one float32 scale for each output [n]."""
    wide = weight.float()
    step = wide.abs().amax(-1) / 127
    return _nearest(wide * _inverse(step)).to(torch.int8), step


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> float8_e4m3fn [n, k], rounded to nearest even, and one float32 scale for each output [n]."""
    wide = weight.float()
    step = wide.abs().amax(-1) / _FP8_MAX
    # A product may exceed the largest value by rounding, which would become NaN.
    return (wide * _inverse(step)).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), step


def _inverse(step: torch.Tensor) -> torch.Tensor:
    """1 / step, 0 where step is 0, for a multiplication along the last dimension."""
    return torch.where(step == 0, 0.0, 1 / step)[..., None]


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """Halves are rounded away from zero, as C's roundf does."""
    return torch.trunc(values + torch.copysign(torch.full_like(values, 0.5), values))


def _to_nibbles(values: torch.Tensor) -> torch.Tensor:
    return (values + 0.5).to(torch.int32).clamp(0, 15).to(torch.uint8).flatten(1)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()
