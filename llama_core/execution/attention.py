"""Attention of one step in torch: decode rows together, a prefill row by itself. The definition for the other backends.

`window`: the number of latest positions that a query sees, its own included; FULL_ATTENTION for all. Blocks behind the window
are never read, because they may belong to another sequence.
"""

import torch
import torch.nn.functional as F

from llama_core.model_config import FULL_ATTENTION

# Queries of a windowed prefill that attend together at least: fewer would waste launches on small products.
_MIN_QUERIES = 128


def attend_decodes(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    window: int = FULL_ATTENTION,
) -> torch.Tensor:
    """One query for each row: q [B, n_heads, head_dim] -> the same shape.

    keys, values: one layer's cache. block_tables: int64 [B, N]. Row i, at position lengths[i] - 1, attends to the positions
    before lengths[i] that lie in its window.
    """
    starts = torch.zeros_like(lengths)
    if window:
        block_tables, starts, lengths = _cut_to_window(block_tables, lengths, window, block_size=keys.shape[1])
    return _attend_rows(q, keys[block_tables].flatten(1, 2), values[block_tables].flatten(1, 2), starts, lengths)


def attend_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int = FULL_ATTENTION
) -> torch.Tensor:
    """Several queries of one row: q [S, n_heads, head_dim], keys and values [L, n_kv_heads, head_dim].

    The last key is that of the last query. Earlier keys than those of the first query's window may be missing.
    """
    before = len(keys) - len(q)
    step = max(window, _MIN_QUERIES)
    if not window or len(q) <= step:
        return _attend_causal(q, keys, values, window)
    parts = []
    for begin in range(0, len(q), step):
        end = min(begin + step, len(q))
        seen = slice(max(0, before + begin - window + 1), before + end)
        parts.append(_attend_causal(q[begin:end], keys[seen], values[seen], window))
    return torch.cat(parts)


def _cut_to_window(
    block_tables: torch.Tensor, lengths: torch.Tensor, window: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part of each row's block table that its window sees, and the range of visible positions in it: starts and ends,
    [B]."""
    first = (lengths - window).clamp(min=0)
    first_block = first // block_size
    num_blocks = min((window + block_size - 2) // block_size + 1, block_tables.shape[1])
    index = first_block[:, None] + torch.arange(num_blocks, device=lengths.device)
    last_block = (lengths - 1) // block_size
    skipped = first_block * block_size
    return block_tables.gather(1, index.minimum(last_block[:, None])), first - skipped, lengths - skipped


def _attend_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Row i of keys, values [B, L, n_kv_heads, head_dim] is seen in [starts[i], ends[i]). Heads that share keys are computed in
    one matrix product."""
    head_dim, n_kv_heads = q.shape[-1], keys.shape[2]
    grouped = q.reshape(len(q), n_kv_heads, -1, head_dim)  # [B, n_kv_heads, group, head_dim]
    scores = torch.matmul(grouped, keys.permute(0, 2, 3, 1)).float() * head_dim**-0.5
    position = torch.arange(keys.shape[1], device=q.device)
    hidden = (position < starts[:, None]) | (position >= ends[:, None])  # [B, L]
    weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1).type_as(q)
    # A weight of zero is not enough: other sequences may have left NaN in the cache, and zero times NaN is NaN.
    values = values.masked_fill(hidden[:, :, None, None], 0)
    return torch.matmul(weights, values.transpose(1, 2)).flatten(1, 2)


def _attend_causal(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    before = len(keys) - len(q)
    mask = None
    if before or (window and len(q) > window):
        own = before + torch.arange(len(q), device=q.device)[:, None]
        position = torch.arange(len(keys), device=q.device)
        mask = position <= own
        if window:
            mask &= position > own - window
    shares_keys = q.shape[1] != keys.shape[1]
    if mask is not None and shares_keys and q.is_cuda:
        # With a mask and shared keys, torch holds all scores in float32. Repeating the keys avoids that.
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
        shares_keys = False
    out: torch.Tensor = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=shares_keys,
    )
    return out[0].transpose(0, 1)
