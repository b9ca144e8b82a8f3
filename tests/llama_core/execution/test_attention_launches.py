"""Launches of attention on each target: tiles have all heads that share a key head, and buffers fit into shared memory."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernel_compiler import TARGETS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("has_much", [False, True])
def test_a_tile_has_all_heads_that_share_a_key_head(has_much: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from llama_core.execution.fused import attention_launches

    monkeypatch.setattr(attention_launches, "has_much_shared_memory", lambda: has_much)
    for group in (1, 7, 64, 71, 128):
        for dtype, head_dim, batch_invariant in itertools.product(DTYPES, (64, 128, 256), (False, True)):
            sizes = attention_launches.tile_sizes(2 * group, 2, head_dim, dtype, batch_invariant=batch_invariant)
            assert min(sizes) >= 1, (group, dtype, head_dim, batch_invariant)


@pytest.mark.parametrize("sm", TARGETS)
def test_each_target_has_room_for_buffers_that_are_loaded_ahead(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton loads keys and values while it computes from 5 stages on: it then has two buffers of each, or three where products
    of 64 rows and more read both factors in shared memory."""
    pytest.importorskip("triton")
    from llama_core.execution.fused import attention_launches, layer_kernels

    target = TARGETS[sm]
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": target.block_shared})
    active = SimpleNamespace(get_current_device=lambda: 0, utils=utils)
    monkeypatch.setattr(layer_kernels, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(attention_launches, "has_much_shared_memory", layer_kernels.has_much_shared_memory.__wrapped__)
    is_large = sm in (90, 100)
    for head_dim in (64, 128, 256):
        decode, chunk = attention_launches.launches(4, torch.bfloat16, head_dim, batch_invariant=False)
        for launch in (decode, chunk):
            buffers = 3 if is_large and launch.rows >= 64 else 2
            # What a decode writes to memory passes through shared memory in float32.
            written = launch.rows * head_dim * 4 if launch is decode else 0
            num_bytes = (launch.rows + 2 * buffers * launch.positions) * head_dim * 2 + written + 2048
            assert launch.num_stages == 5 and num_bytes <= target.block_shared, (head_dim, launch)
            if launch.most_registers is not None:
                programs = 65_536 // (launch.num_warps * 32 * launch.most_registers)
                assert programs == 4 and programs * num_bytes <= target.sm_shared, (head_dim, launch)
        assert (decode.most_registers is not None) == (is_large and head_dim == 128)
        float8, _ = attention_launches.reading_float8(decode, chunk, torch.bfloat16)
        assert float8.most_registers == (168 if decode.most_registers is not None else None)
        many_heads, chunk = attention_launches.launches(32, torch.bfloat16, head_dim, batch_invariant=False)
        assert attention_launches.reading_float8(many_heads, chunk, torch.bfloat16)[0].most_registers is None
        # 64 heads that share a key head would spill up to 680 bytes of a thread with fewer registers.
        assert attention_launches._decode_launch(64, torch.bfloat16, head_dim).most_registers is None
