"""torch's attention over sequences of any length (FlashAttention 2), beside which the paged kernel is checked and measured.

It reads pages only with FlashAttention 3, which torch does not ship. Here it gets keys and values without pages. It splits long
contexts only for decodes with grouped queries.
"""

import inspect
from collections.abc import Callable, Sequence

import torch

from llama_core.model.operations import FULL_ATTENTION
from llama_core.scheduling.step import Row


def varlen_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Sequence[Row], window: int = FULL_ATTENTION
) -> Callable[[], torch.Tensor]:
    """A call that returns the attention [T, n_heads, head_dim] of the queries `q` of `rows`, in their order.

    keys, values: [positions, n_kv_heads, head_dim], of each row in turn all positions up to its last one, in float16 or
    bfloat16 on a GPU. window: how many positions a query sees, its own included. Raises ImportError where torch lacks it.
    """
    from torch.nn.attention.varlen import varlen_attn

    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        raise ImportError("this version of torch has no attention with windows and grouped queries")
    lengths, ends = [row.length for row in rows], [row.start + row.length for row in rows]
    q_bounds, k_bounds = (
        torch.tensor([0, *counts], dtype=torch.int32, device=q.device).cumsum(0, dtype=torch.int32)
        for counts in (lengths, ends)
    )
    # A query sees itself, and so many positions before and behind it; -1 is all. Only a call without a window splits contexts.
    is_decode = max(lengths) == 1 and not window
    sides = (-1, -1) if is_decode else (window - 1 if window else -1, 0)

    def call() -> torch.Tensor:
        out = varlen_attn(
            q, keys, values, q_bounds, k_bounds, max(lengths), max(ends), window_size=sides, enable_gqa=True
        )
        assert isinstance(out, torch.Tensor)
        return out

    return call
