"""Rotary position embedding (Su et al. 2021): the table of angles, and the rotation of queries and keys by it."""

import torch


def rotary_table(head_dim: int, max_seq_len: int, theta: float, device: torch.device) -> torch.Tensor:
    """cos and sin of position * theta^(-2i / head_dim): float32 [max_seq_len, head_dim / 2, 2]."""
    exponents = torch.arange(0, head_dim, 2, device=device)[: head_dim // 2].float() / head_dim
    angles = torch.outer(torch.arange(max_seq_len, device=device).float(), 1.0 / theta**exponents)
    # Not Tensor.cos: its first call in a process was off by 1e-4 in a second thread's half, about once in 100 starts.
    return torch.view_as_real(torch.polar(torch.ones_like(angles), angles))


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs (2i, 2i + 1) of x [T, heads, head_dim] by the angles of table [T, head_dim / 2, 2]."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = table.unsqueeze(1).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)
