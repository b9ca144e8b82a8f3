"""The kernels of a layer between its products, and of a step before and after its layers. Functions that other kernels share:
programmatic dependent launch, and operations on a row or tile, each of which rounds its result to the model's dtype.

With programmatic dependent launch (CUDA, sm_90 and later) a kernel's programs start while the kernel before still runs, so that
the launch takes no time of its own. Norms, the rotary embedding, attention and the products of few rows are launched this way.
Before a program waits for the kernel before, it loads only what no kernel of the layers writes: norms' weights, positions,
the slot mapping, the rotary table and tiles of attention. Kernels without programmatic dependent launch write these before
the layers begin; the first norm waits for them, before it lets any other kernel of the layers start.

Each kernel says when the next one may start. Products of 1 or 8 rows that start beside another product take longer than after
it, probably because their programs are spread unevenly over the multiprocessors. So a kernel lets a following product start
only after its own wait, which ends when all earlier kernels have ended. `_gated_product` does so at its end.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from functools import cache
from typing import Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer
from triton.runtime import driver

from llama_core.backends.weight_formats.tile_kernels import to_float8

_MUCH: Final = 224 * 1024  # bytes of shared memory of one program at most, on sm_90 and sm_100
_LEAST_SM: Final = 90  # the first with programmatic dependent launch


@cache
def has_early_launch() -> bool:
    """Whether kernels run on a GPU with programmatic dependent launch, rather than in Triton's interpreter."""
    if triton.knobs.runtime.interpret:
        return False
    try:
        target = driver.active.get_current_target()
    except RuntimeError:  # no GPU
        return False
    return bool(target.backend == "cuda" and target.arch >= _LEAST_SM)


def early_launch() -> dict[str, bool]:
    """Launch options of a kernel that calls `wait_for_previous`."""
    return {"is_early": True, "launch_pdl": True} if has_early_launch() else {"is_early": False}


@triton.jit
def let_next_start(is_early: tl.constexpr):
    """Let the next kernel start once each program of this one has called this or has ended."""
    if is_early:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(is_early: tl.constexpr):
    """Wait until the kernel before has ended.

    Each program of a kernel with `early_launch` calls this. So when such a kernel has ended, all kernels before it have
    ended too.
    """
    if is_early:
        gdc_wait()


def norm_warps(dim: int) -> int:
    """Warps of every kernel that calls `store_norm`. Their number decides the order in which a row's squares are added, so two
    kernels have bit-identical norms of the same rows only with the same number of warps."""
    return 16 if dim >= 4096 else 4


@triton.jit
def plus_bias(x, bias, inside):
    """x + bias, added in float32 and rounded to x's type. bias: pointers, of which those `inside` are read."""
    return (x.to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def store_norm(out, x, weight, inside, dim, eps):
    """Store the RMSNorm of one row to `out`. weight: the norm's, loaded."""
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)).to(x.dtype)
    tl.store(out, (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def gated(gate, up, activation: tl.constexpr):
    """activation(gate) * up. gelu by tanh is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    wide = gate.to(tl.float32)
    slope = wide if activation == "silu" else wide * (1.595769122 + 0.07135481627 * wide * wide)
    activated = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@cache
def has_much_shared_memory() -> bool:
    """Whether a multiprocessor has 228 KB (sm_90, sm_100), not 164 KB (sm_80) or 100 KB (sm_86, sm_89, sm_120)."""
    try:
        device = driver.active.get_current_device()
        properties = driver.active.utils.get_device_properties(device)
    except RuntimeError:  # Triton's interpreter has no device
        return True
    return bool(properties["max_shared_mem"] >= _MUCH)


@triton.jit
def _add_norm(
    weight, states, delta, bias, out, dim, eps, num_splits: tl.constexpr, block: tl.constexpr, is_early: tl.constexpr
):
    """delta: [T, dim], or float32 [num_splits, T, dim], added in order; None to add none. bias: of delta, or None.
    num_splits: 0 where delta has none."""
    row = tl.program_id(0).to(tl.int64) * dim
    column = tl.arange(0, block)
    inside = column < dim
    norm_weight = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_previous(is_early)
    let_next_start(is_early)
    x = tl.load(states + row + column, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + row + column, mask=inside, other=0.0)
        if num_splits > 0:
            stride = tl.num_programs(0).to(tl.int64) * dim
            for split in tl.static_range(1, num_splits):
                added += tl.load(delta + split * stride + row + column, mask=inside, other=0.0)
            added = added.to(x.dtype)
        if bias is not None:
            added = plus_bias(added, bias + column, inside)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(states + row + column, x, mask=inside)
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
    q_norm,
    k_norm,
    bias,
    k_table,
    eps,
    n_heads,
    n_kv_heads,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    heads: tl.constexpr,
    turns_keys: tl.constexpr,
    is_early: tl.constexpr,
):
    """Rotate and store `heads` heads of one token. A head is read and written whole, and split into its pairs in registers.
    k_table: of keys, None where theirs is `table`, or where they are not turned."""
    let_next_start(is_early)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    dim = tl.arange(0, dim_block)
    in_dim = dim < head_dim
    cache_slot = tl.load(slot_mapping + token)
    if table is not None:
        angle = tl.load(table + tl.load(positions + token) * head_dim + dim, mask=in_dim, other=0.0)
    if q_norm is not None:
        q_factor = tl.load(q_norm + dim, mask=in_dim, other=0.0).to(tl.float32)
        k_factor = tl.load(k_norm + dim, mask=in_dim, other=0.0).to(tl.float32)
    if k_table is not None:
        k_angle = tl.load(k_table + tl.load(positions + token) * head_dim + dim, mask=in_dim, other=0.0)
    wait_for_previous(is_early)
    total = n_heads + 2 * n_kv_heads
    inside = (head < total)[:, None] & in_dim[None, :]
    at = head[:, None] * head_dim + dim[None, :]
    source = qkv + token * total * head_dim + at
    x = tl.load(source, mask=inside, other=0.0)
    if bias is not None:
        x = plus_bias(x, bias + at, inside)
    is_query, is_value = head < n_heads, head >= n_heads + n_kv_heads
    turned = x
    if q_norm is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / head_dim + eps)
        factor = tl.where(is_query[:, None], q_factor[None, :], k_factor[None, :])
        turned = ((wide * scale[:, None]).to(x.dtype).to(tl.float32) * factor).to(x.dtype)
    if table is not None:
        even, odd = tl.split(tl.reshape(turned.to(tl.float32), (heads, dim_block // 2, 2)))
        cos, sin = tl.split(tl.reshape(angle, (dim_block // 2, 2)))
        cos, sin = cos[None, :], sin[None, :]
        if k_table is not None:
            k_cos, k_sin = tl.split(tl.reshape(k_angle, (dim_block // 2, 2)))
            cos = tl.where(is_query[:, None], cos, k_cos[None, :])
            sin = tl.where(is_query[:, None], sin, k_sin[None, :])
        if not turns_keys:
            cos = tl.where(is_query[:, None], cos, 1.0)
            sin = tl.where(is_query[:, None], sin, 0.0)
        turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (heads, dim_block)).to(x.dtype)
    place = cache_slot * n_kv_heads * head_dim + at
    tl.store(source, turned, mask=inside & is_query[:, None])
    is_key = (head >= n_heads) & (head < n_heads + n_kv_heads)
    _store(keys + place - n_heads * head_dim, turned, inside & is_key[:, None])
    _store(values + place - (n_heads + n_kv_heads) * head_dim, x, inside & is_value[:, None])


@triton.jit
def _gate(gate_up, bias, out, hidden, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    gate = tl.load(gate_up + row * 2 * hidden + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * hidden + hidden + column, mask=inside, other=0.0)
    if bias is not None:
        gate = plus_bias(gate, bias + column, inside)
        up = plus_bias(up, bias + hidden + column, inside)
    tl.store(out + row * hidden + column, gated(gate, up, activation), mask=inside)


@triton.jit(do_not_specialize=["factor"])
def _add_time(sums, factor, index: tl.constexpr, has_clock: tl.constexpr):
    if has_clock:
        tl.store(sums + index, tl.load(sums + index) + factor.to(tl.int64) * globaltimer())


@triton.jit(do_not_specialize=["token_stride", "table_stride"])
def _embed(
    known, places, weight, results, token_stride, table_stride, columns, block_size: tl.constexpr, block: tl.constexpr
):
    """Some columns of one token's embedding; the first program of each token also writes its slot mapping. known: the slots'
    tokens and block tables. places: slots and positions. results: embeddings and slot mapping."""
    tokens, block_tables = known
    slots, positions = places
    out, slot_mapping = results
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    token = tl.load(tokens + slot * token_stride + position)
    if tl.program_id(1) == 0:
        block_number = tl.load(block_tables + slot * table_stride + position // block_size)
        tl.store(slot_mapping + row, block_number * block_size + position % block_size)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    target = out + row * columns + column
    tl.store(target, tl.load(weight + token * columns + column, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["token_stride", "count"])
def _store_samples(sampled, slots, positions, slot_tokens, results, token_stride, count, block: tl.constexpr):
    """Store one block of samples."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < count
    sample = tl.load(sampled + index, mask=inside, other=0)
    slot = tl.load(slots + index, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0)
    tl.store(results + index, sample, mask=inside)
    tl.store(slot_tokens + slot * token_stride + position, tl.maximum(sample, 0), mask=inside)
