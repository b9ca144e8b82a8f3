"""Attention over the paged KV cache in Triton, for decodes, draft tokens to verify and prefill chunks.

A program computes one tile: consecutive tokens of a sequence, with all query heads that share a key head. It reads block
tables, keys and values in place. The context of a decode is split at fixed positions (`attention_launches.py`), and the splits'
results are combined in order: by `_combine_splits`, or, in large batches (`combines_in_kernel`), by the program, which then
computes all splits of a decode. Both give the same bits. So a row's result depends neither on the other rows nor on the
configuration.

A split's result has the binary log of its sum beside it, so that results with different common factors can be added (flash
decoding, Dao et al. 2023).

With `batch_invariant` a token's result is also the same in a decode and in a prefill chunk. Both have tiles of the same size;
a chunk's program computes the same splits one after the other, and combines them in the same order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl

from llama_core.backends.fused.layer_kernels import let_next_start, wait_for_previous
from llama_core.backends.fused.step_memory import SPLIT_BITS, SPLIT_UNIT
from llama_core.backends.fused.step_plan import TILE_COLUMNS
from llama_core.backends.weight_formats.tile_kernels import from_float8

_SPLIT_UNIT = tl.constexpr(SPLIT_UNIT)
_SPLIT_BITS = tl.constexpr(SPLIT_BITS)
_TILE_COLUMNS = tl.constexpr(TILE_COLUMNS)
_COMBINED_AT_ONCE = tl.constexpr(8)  # splits whose results are loaded before the first one is added


class Form(NamedTuple):
    """What `_attend` is compiled for. group: query heads that share a key head. rows: of a program, those of `queries` tokens.
    tile: cached positions that it reads at a time. dim_block: head_dim, padded for products. is_decode: the tiles are those of
    decodes. is_split, combines: see `_attend`."""

    group: int
    queries: int
    rows: int
    tile: int
    head_dim: int
    dim_block: int
    block_size: int
    window: int
    is_decode: bool
    is_split: bool
    combines: bool


@triton.jit
def first_seen_of(length, window: tl.constexpr):
    """The first position that the last of `length` positions attends to."""
    if window > 0:
        return tl.maximum(length - window, 0)
    if window < 0:  # a chunk
        return (length - 1) // -window * -window
    return length * 0


@triton.jit
def split_of(position):
    """See `step_memory.split_of`. The exponent is read from a float32, which represents integers below 2^24 exactly."""
    units = position // _SPLIT_UNIT
    exponent = (units.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127 - _SPLIT_BITS
    exponent = tl.maximum(exponent, 0)
    return (exponent << _SPLIT_BITS) + (units >> exponent)


@triton.jit
def split_begin(split):
    """See `step_memory.split_begin`."""
    exponent = tl.maximum((split >> _SPLIT_BITS) - 1, 0)
    return ((split - (exponent << _SPLIT_BITS)) << exponent) * _SPLIT_UNIT


@triton.jit
def combine_weights(best, log_sum):
    """The factors of the splits combined so far and of a further split, and the binary log of their new common factor."""
    highest = tl.maximum(best, log_sum)
    return tl.exp2(best - highest), tl.exp2(log_sum - highest), highest


@triton.jit
def weighted_sum(mixed, kept, part, weight):
    """mixed * kept + part * weight: a split's result is added to those combined so far."""
    # An explicit FMA: without it, the compiler chooses which product it rounds, and may choose differently in each kernel.
    return tl.fma(mixed, kept, part * weight)


@triton.jit(do_not_specialize=["n_splits", "n_heads"])
def _combine_splits(partial, log_sums, tiles, out, n_splits, n_heads, form: tl.constexpr, is_early: tl.constexpr):
    """The result of a tile's tokens for one head. The arguments are those of `_attend` with is_split."""
    about, head = tiles + tl.program_id(0) * _TILE_COLUMNS, tl.program_id(1)
    dim = tl.arange(0, form.dim_block)
    in_dim = dim < form.head_dim
    first_token, count = tl.load(about), tl.load(about + 1)
    first, decode_token = tl.load(about + 3), tl.load(about + 4)
    wait_for_previous(is_early)
    let_next_start(is_early)
    for index in range(0, count):
        length = first + index + 1
        parts = ((decode_token + index) * n_heads + head) * n_splits
        mixed = tl.full([form.dim_block], 0.0, tl.float32)
        total = 0.0
        best = float("-inf")
        begin = split_of(first_seen_of(length, form.window))
        end = split_of(length - 1) + 1
        # Unrolled, so that several splits are loaded at once. Splits after the end have a weight of 0, which changes no bit.
        for several in range(begin, end, _COMBINED_AT_ONCE):
            for ahead in tl.static_range(_COMBINED_AT_ONCE):
                split = several + ahead
                at = parts + split % n_splits
                log_sum = tl.load(log_sums + at, mask=split < end, other=float("-inf"))
                part = tl.load(partial + at * form.head_dim + dim, mask=in_dim & (split < end), other=0.0)
                kept, weight, best = combine_weights(best, log_sum)
                mixed = weighted_sum(mixed, kept, part, weight)
                total = weighted_sum(total, kept, weight, 1.0)
        place = out + ((first_token + index) * n_heads + head) * form.head_dim + dim
        tl.store(place, (mixed / total).to(out.dtype.element_ty), mask=in_dim)


@triton.jit
def _read(cached, inside, to: tl.constexpr):
    """Load cached values, which are stored in the model's dtype or as bytes of float8."""
    if cached.dtype.element_ty == tl.uint8:
        values = from_float8(tl.load(cached, mask=inside, other=0)).to(to)
    else:
        values = tl.load(cached, mask=inside, other=0.0)
    return values


@triton.jit
def _nothing_seen(rows: tl.constexpr, dim_block: tl.constexpr):
    """The initial values of the sums of `_attend_tile`."""
    mixed = tl.zeros([rows, dim_block], tl.float32)
    return mixed, tl.zeros([rows], tl.float32), tl.full([rows], float("-inf"), tl.float32)


@triton.jit
def _masked(scores, position, first_seen, length):
    visible = (position[None, :] >= first_seen[:, None]) & (position[None, :] < length[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _attend_tile(
    sums, seeing, cache, blocks, first, borders, kv_head, n_kv_heads, scale, form: tl.constexpr, skips: tl.constexpr
):
    """Add a tile of positions from `first` on to each query's running sums (online softmax), and return the new sums.

    sums: the sum of the weighted values; that of the weights; and the greatest scaled score so far, which is the binary log of
    the common factor of both sums; -inf before the first position. seeing: queries, and the positions [first_seen[i],
    length[i]) that query i sees. cache: keys and values. borders: the tile reads its positions in [seen, end). skips: all
    queries see all positions before `all_see`, so tiles there need no mask.
    """
    seen, end, all_see = borders
    mixed, total, best = sums
    query, first_seen, length = seeing
    keys, values = cache
    dim = tl.arange(0, form.dim_block)
    in_dim = dim < form.head_dim
    position = first + tl.arange(0, form.tile)
    # Values outside may be another sequence's, and may be NaN: a weight of zero times NaN is NaN.
    inside = (position >= seen) & (position < end)
    block = tl.load(blocks + position // form.block_size, mask=inside, other=0)
    is_inside = inside[:, None] & in_dim[None, :]
    place = ((block * form.block_size + position % form.block_size) * n_kv_heads + kv_head) * form.head_dim
    at = place[:, None] + dim[None, :]
    key = _read(keys + at, is_inside, query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if skips:
        if first + form.tile > all_see:
            scores = _masked(scores, position, first_seen, length)
    else:
        scores = _masked(scores, position, first_seen, length)
    highest = tl.maximum(best, tl.max(scores, axis=1) * scale)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    kept = tl.exp2(best - shift)
    value = _read(values + at, is_inside, query.dtype)
    mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    total = total * kept + tl.sum(weights, axis=1)
    return mixed, total, highest


# Without `do_not_specialize`, Triton would compile further variants for some numbers of blocks while the server runs. The
# number of heads changes no address's alignment, so one variant is enough for all.
@triton.jit(do_not_specialize=["table_stride", "n_splits", "n_kv_heads"])
def _attend(
    tiles, q, cache, tables, results, table_stride, n_splits, n_kv_heads, form: tl.constexpr, is_early: tl.constexpr
):
    """Attention of one tile, or of a program's share of the tile's splits.

    q: the queries, the stride of a token, and the scale of scores. results: `out` and `log_sums`. Without is_split, `out` is
    the result, [T, H, head_dim]. With is_split, each split writes its normalized result to `out`, float32 [decode tokens, H,
    n_splits, head_dim], and the binary log of its sum to `log_sums` [decode tokens, H, n_splits]; split s is at index s %
    n_splits. With combines too, a program computes all splits of its tile, and writes to `out` the result that
    `_combine_splits` would write. The grid of decodes is [K, tiles, programs]; that of chunks is [tiles, K].
    """
    queries, q_stride, scale = q
    out, log_sums = results
    # The next kernel is `_combine_splits`, which may start at once, or a product, which may not.
    combine_follows: tl.constexpr = form.is_split and not form.combines
    if combine_follows:
        let_next_start(is_early)
    # Programs that run at the same time read neighbouring memory: programs of decodes read all heads of a position, programs of
    # chunks one head, whose positions stay in the GPU's L2 cache for the next tile.
    if form.is_decode:
        kv_head, about = tl.program_id(0), tiles + tl.program_id(1) * _TILE_COLUMNS
    else:
        # The last tiles of a prompt see the most positions, so they start first.
        tile_index = tl.num_programs(0) - 1 - tl.program_id(0)
        about, kv_head = tiles + tile_index * _TILE_COLUMNS, tl.program_id(1)
    first_token, count, slot = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    first, decode_token = tl.load(about + 3), tl.load(about + 4)
    wait_for_previous(is_early)
    if not combine_follows:
        let_next_start(is_early)
    if count > 0:
        blocks = tables + slot * table_stride
        row = tl.arange(0, form.rows)
        index = row // form.group
        head = kv_head * form.group + row % form.group
        dim = tl.arange(0, form.dim_block)
        in_dim = dim < form.head_dim
        is_query = (index < count) & (index < form.queries)
        is_value = is_query[:, None] & in_dim[None, :]
        asked = queries + (first_token + index)[:, None] * q_stride + head[:, None] * form.head_dim + dim[None, :]
        query = tl.load(asked, mask=is_value, other=0.0)
        length = first + index + 1
        first_seen = first_seen_of(length, form.window)
        seen, end = first_seen_of(first + 1, form.window), first + count
        n_heads = n_kv_heads * form.group
        begin, stop = seen // form.tile * form.tile, end
        if form.is_split:
            split = split_of(seen)
            if form.combines:
                combined, combined_total, combined_best = _nothing_seen(form.rows, form.dim_block)
            else:
                # A program computes the splits that begin in its share of the positions. Equal numbers of splits would be
                # unequal work, because later splits are longer.
                share = tl.cdiv(end - begin, tl.num_programs(2))
                own = begin + tl.program_id(2) * share
                if tl.program_id(2) > 0:
                    split = split_of(own - 1) + 1
                next_split = split_of(own + share - 1) + 1
                begin = tl.maximum(split_begin(split), begin)
                stop = tl.minimum(split_begin(next_split), end)
                token = decode_token + index
            split_end = split_begin(split + 1)
        mixed, total, best = _nothing_seen(form.rows, form.dim_block)
        seeing, borders = (query, first_seen, length), (seen, end, first + 1)
        skips_masks: tl.constexpr = form.window == 0 and not form.is_split
        # One loop reads all splits: with a loop for each split, the program would wait for the first positions of each.
        for at in range(begin, stop, form.tile):
            mixed, total, best = _attend_tile(
                (mixed, total, best), seeing, cache, blocks, at, borders, kv_head, n_kv_heads, scale, form, skips_masks
            )
            if form.is_split:  # noqa: SIM102, known when the kernel is compiled
                if (at + form.tile >= split_end) | (at + form.tile >= stop):
                    part, log_sum = mixed / total[:, None], best + tl.log2(total)
                    # A split may lie outside the window of some of the tile's queries.
                    sees = is_query & (first_seen < split_end) & (length > split_begin(split))
                    if form.combines:
                        kept, weight, highest = combine_weights(combined_best, log_sum)
                        both = weighted_sum(combined, kept[:, None], part, weight[:, None])
                        combined = tl.where(sees[:, None], both, combined)
                        combined_total = tl.where(sees, weighted_sum(combined_total, kept, weight, 1.0), combined_total)
                        combined_best = tl.where(sees, highest, combined_best)
                    else:
                        place = (token * n_heads + head) * n_splits + split % n_splits
                        target = out + place[:, None] * form.head_dim + dim[None, :]
                        tl.store(target, part, mask=sees[:, None] & in_dim[None, :])
                        tl.store(log_sums + place, log_sum, mask=sees)
                    mixed, total, best = _nothing_seen(form.rows, form.dim_block)
                    split += 1
                    split_end = split_begin(split + 1)
        if form.combines:
            mixed, total = combined, combined_total
        if form.combines or not form.is_split:
            result = (mixed / total[:, None]).to(out.dtype.element_ty)
            whole = ((first_token + index) * n_heads + head) * form.head_dim
            tl.store(out + whole[:, None] + dim[None, :], result, mask=is_value)
