"""Attention of one step in torch: decode rows together, a prefill row by itself. The definition for the other backends."""

import torch
import torch.nn.functional as F


def attend_decodes(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """One query for each row: q [B, n_heads, head_dim] -> the same shape. Heads that share keys are computed in one matrix
    product.

    keys, values: [B, L, n_kv_heads, head_dim], of which row i sees the first lengths[i].
    """
    head_dim, n_kv_heads = q.shape[-1], keys.shape[2]
    grouped = q.reshape(len(q), n_kv_heads, -1, head_dim)  # [B, n_kv_heads, group, head_dim]
    scores = torch.matmul(grouped, keys.permute(0, 2, 3, 1)).float() * head_dim**-0.5
    beyond = torch.arange(keys.shape[1], device=q.device) >= lengths[:, None]  # [B, L]
    weights = scores.masked_fill(beyond[:, None, None, :], float("-inf")).softmax(-1).type_as(q)
    # A weight of zero is not enough: other sequences may have left NaN in the cache, and zero times NaN is NaN.
    values = values.masked_fill(beyond[:, :, None, None], 0)
    return torch.matmul(weights, values.transpose(1, 2)).flatten(1, 2)


def attend_prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Several queries of one row, query i at position start + i: q [S, n_heads, head_dim], keys [start + S, ...]."""
    mask = None
    shares_keys = q.shape[1] != keys.shape[1]
    if start and shares_keys and q.is_cuda:
        # With a mask and shared keys, torch holds all scores in float32. Repeating the keys avoids that.
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
        shares_keys = False
    if start:
        seen = torch.arange(keys.shape[0], device=q.device)
        mask = seen <= (start + torch.arange(q.shape[0], device=q.device))[:, None]
    out: torch.Tensor = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=shares_keys,
    )
    return out[0].transpose(0, 1)
