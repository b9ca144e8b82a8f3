"""The operations of `ops.py` in Triton. No launch waits for the host, and no row's result depends on the other rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from llama_core.execution.float8_kernels import to_float8
from llama_core.execution.fused.attention_kernels import attend
from llama_core.execution.fused.attention_launches import tile_sizes
from llama_core.execution.fused.kernel_functions import (
    early_launch,
    let_next_start,
    norm_warps,
    plus_bias,
    silu_times,
    store_norm,
    wait_for_previous,
)
from llama_core.execution.fused.ops import HeadNorms
from llama_core.execution.fused.product_choice import Fuses, never
from llama_core.execution.fused.product_kernels import (
    TileChoice,
    add_product,
    gated_product,
    has_many_outputs,
    product,
    tiles_of,
)
from llama_core.execution.fused.sampler import Sampler, SamplingState
from llama_core.execution.fused.step_plan import AttentionTiles, TileSizes
from llama_core.execution.fused.token_kernels import embed, store_samples
from llama_core.execution.fused.triton_sampler import TritonSampler
from llama_core.execution.weight_formats.format import TorchMatrix
from llama_core.model_config import FULL_ATTENTION

_HEADS_A_PROGRAM = 8  # heads that one program rotates: 8 values of 16 bits for each thread, with heads of 128


@triton.jit
def _add_norm(
    hidden_states,
    delta,
    bias,
    weight,
    out,
    dim,
    eps,
    has_delta: tl.constexpr,
    has_bias: tl.constexpr,
    num_splits: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
):
    """num_splits: 0 for `delta` [T, dim]; else the number of splits of `delta`, float32 [num_splits, T, dim], added in
    order."""
    row = tl.program_id(0).to(tl.int64) * dim
    column = tl.arange(0, block)
    inside = column < dim
    norm_weight = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_previous(is_early)
    let_next_start(is_early)
    x = tl.load(hidden_states + row + column, mask=inside, other=0.0)
    if has_delta:
        added = tl.load(delta + row + column, mask=inside, other=0.0)
        if num_splits > 0:
            stride = tl.num_programs(0).to(tl.int64) * dim
            for split in tl.static_range(1, num_splits):
                added += tl.load(delta + split * stride + row + column, mask=inside, other=0.0)
            added = added.to(x.dtype)
        if has_bias:
            added = plus_bias(added, bias + column, inside)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(hidden_states + row + column, x, mask=inside)
    store_norm(out + row + column, x, norm_weight, inside, dim, eps)


@triton.jit
def _store(cached, x, inside):
    """Store x in a cache of its own type, or of bytes of float8."""
    if cached.dtype.element_ty == tl.uint8:
        tl.store(cached, to_float8(x), mask=inside)
    else:
        tl.store(cached, x, mask=inside)


# The numbers of heads change no address's alignment, so one variant is enough for all.
@triton.jit(do_not_specialize=["n_heads", "n_kv_heads"])
def _rotate_and_store(
    qkv,
    table,
    positions,
    slot_mapping,
    keys,
    values,
    bias,
    q_norm,
    k_norm,
    eps,
    n_heads,
    n_kv_heads,
    has_bias: tl.constexpr,
    has_norms: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    heads: tl.constexpr,
    is_early: tl.constexpr,
):
    """Rotate and store `heads` heads of one token. A head is read and written whole, and split into its pairs in registers."""
    let_next_start(is_early)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    dim = tl.arange(0, dim_block)
    in_dim = dim < head_dim
    cache_slot = tl.load(slot_mapping + token)
    angle = tl.load(table + tl.load(positions + token) * head_dim + dim, mask=in_dim, other=0.0)
    if has_norms:
        q_factor = tl.load(q_norm + dim, mask=in_dim, other=0.0).to(tl.float32)
        k_factor = tl.load(k_norm + dim, mask=in_dim, other=0.0).to(tl.float32)
    wait_for_previous(is_early)
    total = n_heads + 2 * n_kv_heads
    inside = (head < total)[:, None] & in_dim[None, :]
    at = head[:, None] * head_dim + dim[None, :]
    source = qkv + token * total * head_dim + at
    x = tl.load(source, mask=inside, other=0.0)
    if has_bias:
        x = plus_bias(x, bias + at, inside)
    is_query, is_value = head < n_heads, head >= n_heads + n_kv_heads
    turned = x
    if has_norms:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / head_dim + eps)
        factor = tl.where(is_query[:, None], q_factor[None, :], k_factor[None, :])
        turned = ((wide * scale[:, None]).to(x.dtype).to(tl.float32) * factor).to(x.dtype)
    even, odd = tl.split(tl.reshape(turned.to(tl.float32), (heads, dim_block // 2, 2)))
    cos, sin = tl.split(tl.reshape(angle, (dim_block // 2, 2)))
    pairs = tl.join(even * cos[None, :] - odd * sin[None, :], even * sin[None, :] + odd * cos[None, :])
    turned = tl.reshape(pairs, (heads, dim_block)).to(x.dtype)
    place = cache_slot * n_kv_heads * head_dim + at
    tl.store(source, turned, mask=inside & is_query[:, None])
    is_key = (head >= n_heads) & (head < n_heads + n_kv_heads)
    _store(keys + place - n_heads * head_dim, turned, inside & is_key[:, None])
    _store(values + place - (n_heads + n_kv_heads) * head_dim, x, inside & is_value[:, None])


@triton.jit
def _gated_silu(gate_up, bias, out, hidden, has_bias: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    gate = tl.load(gate_up + row * 2 * hidden + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * hidden + hidden + column, mask=inside, other=0.0)
    if has_bias:
        gate = plus_bias(gate, bias + column, inside)
        up = plus_bias(up, bias + hidden + column, inside)
    tl.store(out + row * hidden + column, silu_times(gate, up), mask=inside)


@triton.jit(do_not_specialize=["factor"])
def _add_time(sums, factor, index: tl.constexpr, has_clock: tl.constexpr):
    if has_clock:
        tl.store(sums + index, tl.load(sums + index) + factor.to(tl.int64) * globaltimer())


class TritonOps:
    """See `ops.Ops`. All tensors lie on the device; rows, and heads in a row, are contiguous.

    Kernels get some other tensor in place of one that is None; they do not read it.
    """

    embed = staticmethod(embed)
    store_samples = staticmethod(store_samples)

    def __init__(
        self, *, batch_invariant: bool = False, fuses: Fuses = never, choose_tiles: TileChoice = tiles_of
    ) -> None:
        """batch_invariant: a token's attention has the same bits in a decode, with drafts and in any chunk of a prompt. fuses:
        chooses the products that run in kernels of our own, together with the operation that follows; with `batch_invariant`,
        no product does. choose_tiles: of these products."""
        self._batch_invariant = batch_invariant
        self._choose_tiles = choose_tiles
        self._fuses = never if batch_invariant else fuses

    def add_norm(
        self,
        hidden_states: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
        *,
        num_splits: int = 0,
    ) -> torch.Tensor:
        """As `Ops.add_norm`. num_splits: 0, or the number of splits of `delta`, float32 [num_splits, T, dim]."""
        out = torch.empty_like(hidden_states)
        count, dim = hidden_states.shape
        _add_norm[(count,)](
            hidden_states,
            hidden_states if delta is None else delta,
            weight if bias is None else bias,
            weight,
            out,
            dim,
            eps,
            has_delta=delta is not None,
            has_bias=bias is not None,
            num_splits=num_splits,
            block=triton.next_power_of_2(dim),
            num_warps=norm_warps(dim),
            **early_launch(),
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        count, total_heads, head_dim = qkv.shape
        n_kv_heads = keys.shape[2]
        n_heads = total_heads - 2 * n_kv_heads
        q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
        heads = min(_HEADS_A_PROGRAM, triton.next_power_of_2(total_heads))
        _rotate_and_store[(count, triton.cdiv(total_heads, heads))](
            qkv,
            table,
            positions,
            slot_mapping,
            keys,
            values,
            qkv if bias is None else bias,
            q_norm,
            k_norm,
            eps,
            n_heads,
            n_kv_heads,
            has_bias=bias is not None,
            has_norms=norms is not None,
            head_dim=head_dim,
            dim_block=triton.next_power_of_2(head_dim),
            heads=heads,
            **early_launch(),
        )
        return qkv[:, :n_heads]

    def tile_sizes(self, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> TileSizes:
        return tile_sizes(n_heads, n_kv_heads, head_dim, dtype, batch_invariant=self._batch_invariant)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        tiles: AttentionTiles,
        window: int = FULL_ATTENTION,
    ) -> torch.Tensor:
        invariant = self._batch_invariant
        return attend(q, keys, values, block_tables, tiles, window, batch_invariant=invariant)

    def gated_silu(self, gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count, width = gate_up.shape
        hidden = width // 2
        out = torch.empty((count, hidden), dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, triton.next_power_of_2(hidden))
        has_bias = bias is not None
        _gated_silu[(count, triton.cdiv(hidden, block))](
            gate_up, bias if has_bias else gate_up, out, hidden, has_bias=has_bias, block=block
        )
        return out

    def product(self, x: torch.Tensor, matrix: TorchMatrix) -> torch.Tensor:
        if self._fuses(matrix.held, len(x)) and has_many_outputs(matrix.held):
            return product(x, matrix.held, self._choose_tiles)
        return matrix.multiply(x)

    def gated_product(self, x: torch.Tensor, matrix: TorchMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._fuses(matrix.held, len(x)):
            return gated_product(x, matrix.held, bias, self._choose_tiles)
        return self.gated_silu(matrix.multiply(x), bias)

    def add_product_norm(
        self,
        hidden_states: torch.Tensor,
        x: torch.Tensor,
        matrix: TorchMatrix,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._fuses(matrix.held, len(x)):
            return self.add_norm(hidden_states, matrix.multiply(x), weight, eps, bias)
        partial = add_product(hidden_states, x, matrix.held, bias, self._choose_tiles)
        if partial is None:
            return self.add_norm(hidden_states, None, weight, eps)
        return self.add_norm(hidden_states, partial, weight, eps, bias, num_splits=len(partial))

    def sampler(self, state: SamplingState, max_samples: int, vocab: int) -> Sampler:
        return TritonSampler(state, max_samples, vocab)

    def add_time(self, sums: torch.Tensor, index: int, factor: int) -> None:
        """As `Ops.add_time`, by the GPU's clock, whose resolution is 32 ns to 1 us. Triton's interpreter has no clock."""
        has_clock = not triton.knobs.runtime.interpret
        _add_time[(1,)](sums, factor, index=index, has_clock=has_clock, num_warps=1)
