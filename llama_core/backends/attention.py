"""Attention over the paged cache in torch, which defines that of the other backends.

`scale`: of scores, head_dim ** -0.5 if None. `window`, `sinks` [n_heads]: see `Attend`. Blocks outside the window may belong to
other sequences, which may have left NaN there.
"""

from typing import TypeVar

import torch
import torch.nn.functional as F

Positions = TypeVar("Positions", int, torch.Tensor)


def first_seen(position: Positions, window: int) -> Positions:
    """The first position that a query sees in a window, which is not that of all positions. It may lie before 0."""
    return position - window + 1 if window > 0 else position // -window * -window


def attend_decodes(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    window: int,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query for each row: q [B, n_heads, head_dim] -> the same shape.

    keys, values: one layer's cache. block_tables: int64 [B, N]. Row i, at position lengths[i] - 1, attends to the positions
    before lengths[i] that lie in its window.
    """
    keys, values = (cache[block_tables].flatten(1, 2) for cache in (keys, values))  # [B, L, n_kv_heads, head_dim]
    head_dim, n_kv_heads = q.shape[-1], keys.shape[2]
    # Heads that share keys are computed in one matrix product.
    grouped = q.reshape(len(q), n_kv_heads, -1, head_dim)  # [B, n_kv_heads, group, head_dim]
    scores = torch.matmul(grouped, keys.permute(0, 2, 3, 1)).float() * (head_dim**-0.5 if scale is None else scale)
    position = torch.arange(keys.shape[1], device=q.device)
    hidden = position >= lengths[:, None]  # [B, L]
    if window:
        hidden |= position < first_seen(lengths[:, None] - 1, window)
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    if sinks is not None:
        of_rows = sinks.float().view(1, n_kv_heads, -1, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat((scores, of_rows), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].type_as(q)
    # A weight of zero is not enough, because zero times NaN is NaN.
    values = values.masked_fill(hidden[:, :, None, None], 0)
    return torch.matmul(weights, values.transpose(1, 2)).flatten(1, 2)


def attend_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Several queries of one row: q [S, n_heads, head_dim], keys and values [L, n_kv_heads, head_dim].

    The last key is that of the last query. Keys before those of the first query's window are missing, whole chunks of them.
    """
    before = len(keys) - len(q)
    mask = None
    if before or (window and len(q) > window) or sinks is not None:
        own = before + torch.arange(len(q), device=q.device)[:, None]
        position = torch.arange(len(keys), device=q.device)
        mask = position <= own
        if window:
            mask &= position >= first_seen(own, window)
    shares_keys = q.shape[1] != keys.shape[1]
    if mask is not None and shares_keys and q.is_cuda:
        # With a mask and shared keys, torch holds all scores in float32. Repeating the keys avoids that.
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
        shares_keys = False
    if sinks is not None and mask is not None:
        # A key of zeros, whose value is zero and whose score is the mask.
        scores = torch.zeros(mask.shape, device=q.device, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        of_heads = scores.expand(len(sinks), -1, -1), sinks.type_as(q).view(-1, 1, 1).expand(-1, len(q), 1)
        mask = torch.cat(of_heads, dim=-1)
        keys, values = (F.pad(each, (0, 0, 0, 0, 0, 1)) for each in (keys, values))
    out: torch.Tensor = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=shares_keys,
        scale=scale,
    )
    return out[0].transpose(0, 1)
