"""Rotary position embedding (Su et al. 2021) in the kinds of `RopeConfig`: the table of angles, and the rotation by it."""

import math

import torch

from llama_core.model.operations import Angles
from llama_core.model.rope import RopeConfig


def rotary_table(angles: Angles, head_dim: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """cos and sin of position * frequency, times the temperature: float32 [max_seq_len, head_dim / 2, 2]; an angle of 0 for
    pairs that are not rotated."""
    table = _cos_and_sin(angles.rope or RopeConfig(dim=0), head_dim, max_seq_len, device)
    if angles.temperature is None:
        return table
    how = angles.temperature
    positions = torch.arange(max_seq_len, device=device) + how.ahead
    terms = torch.log1p(torch.div(positions, how.every, rounding_mode="floor"))
    return table * (1 + how.beta * terms)[:, None, None]


def _cos_and_sin(rope: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    rotated = rope.rotated(head_dim)
    frequencies = _frequencies(rope, rotated, max_seq_len, device)
    angles = torch.outer(torch.arange(max_seq_len, device=device).float(), frequencies)
    # Not Tensor.cos: its first call in a process was off by 1e-4 in a second thread's half, about once in 100 starts.
    table = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    if rope.attention_factor != 1.0:
        table = table * rope.attention_factor
    if rotated < head_dim:
        kept = torch.tensor([1.0, 0.0], device=device).expand(max_seq_len, (head_dim - rotated) // 2, 2)
        table = torch.cat((table, kept), dim=1)
    return table


def _frequencies(rope: RopeConfig, dim: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """Radians per position of each pair: float32 [dim / 2]."""
    exponents = torch.arange(0, dim, 2, device=device)[: dim // 2].float() / dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "dynamic":
        return 1.0 / _dynamic_theta(rope, dim, max_seq_len) ** exponents
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(_longrope_factors(rope, max_seq_len), device=device) * rope.theta**exponents)
    return plain


def _longrope_factors(rope: RopeConfig, max_seq_len: int) -> tuple[float, ...]:
    """LongRoPE (Ding et al. 2024). transformers chooses by the length of the sequence so far; here max_seq_len decides, for the
    reason that `_dynamic_theta` names."""
    assert rope.original_context is not None
    return rope.long_factor if max_seq_len > rope.original_context else rope.short_factor


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_seq_len: int) -> float:
    """The base of the "dynamic NTK" kind for sequences of max_seq_len.

    Other servers stretch the base by the length of the sequence so far, which makes a token's keys depend on when it was
    computed. Here the base is one constant, so a text does not depend on its batch, its prefix hits or a restart.
    """
    assert rope.original_context is not None
    stretch = rope.factor * max(max_seq_len, rope.original_context) / rope.original_context - (rope.factor - 1)
    return rope.theta * math.pow(stretch, head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones are kept, those between are interpolated."""
    assert rope.original_context is not None
    wavelengths = 2 * math.pi / plain
    turns = rope.original_context / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023): the kinds "linear" and "default", blended by how often a pair turns in the original context."""
    assert rope.original_context is not None

    def pair_of(turns: float) -> float:
        """The index of the pair that makes so many turns in the original context."""
        assert rope.original_context is not None
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by the difference
    ramp = (torch.arange(head_dim // 2, device=plain.device, dtype=torch.float32) - low) / (high - low)
    stretched = ramp.clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs (2i, 2i + 1) of x [T, heads, head_dim] by the angles of table [T, head_dim / 2, 2]."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = table.unsqueeze(1).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)
