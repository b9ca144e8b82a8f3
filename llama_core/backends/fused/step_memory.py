"""The memory of the fused backend beside weights and cache, computed before anything is allocated.

The intermediate tensors of all graphs share one pool, which is as large as the largest graph needs. A step without a graph
needs memory for its tensors beside the pool. The tests count the bytes of all tensors on torch's meta device and hold these
figures to them. What torch's allocator rounds, buffers of NCCL and the device's context come from the tenth of the device's
memory that no plan uses.
"""

from typing import Final

import torch

from llama_core.backends.backend import LOGITS_AT_A_TIME
from llama_core.backends.fused.step_plan import (
    CAPTURED_PROMPT_TOKENS,
    LARGEST_PADDING,
    LaunchShape,
    samples_size,
)
from llama_core.backends.kv_cache import CacheShape, cache_dtype
from llama_core.backends.logit_rules import bit_words, table_words
from llama_core.backends.memory_budget import adapter_bytes
from llama_core.backends.parallel import Parallel
from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from llama_core.model.operations import (
    Add,
    Attend,
    ExpertSum,
    GatedExperts,
    GatedLinear,
    Linear,
    Norm,
    Rotate,
    Route,
    TokenGate,
)
from llama_core.model.share import RankShare
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS

# Of kernels and of what libraries take beside torch's allocator: 258 MB on an H100.
LIBRARY_BYTES: Final = 2**28
# Of the sampling kernels.
CHUNK: Final = 4096  # logits that one program reads
BINS: Final = 2048  # bins of a row's probabilities: 32 for each power of two, down to 2^-43
MAX_REPLICAS: Final = 4  # copies of a row's bins, so that atomic additions of equal logits do not all meet in one bin
TOP_BLOCK: Final = 32  # a power of two, at least MAX_TOP_LOGPROBS
_INT: Final = 8
_FLOAT32: Final = 4
_SORTED: Final = 44  # bytes of a logit while it is sampled in torch: values, ids, sums in two types, and rules
# The context of a decode is split at positions that neither max_seq_len nor other sequences change: 64 splits of SPLIT_UNIT
# positions end at 8,192, 32 of twice as many at 16,384, and so on. So a short context has many splits, and the results of a
# long one's splits take little memory.
SPLIT_UNIT: Final = 128  # a multiple of the positions that a program reads at a time
SPLIT_BITS: Final = 5  # binary logarithm of the splits of each size
# Aimed at where programs share a decode's splits: more would only shorten each program's loop.
PROGRAMS_PER_MULTIPROCESSOR: Final = 4
# With so many programs, an H100 or H200 is full.
_FULL_PROGRAMS: Final = PROGRAMS_PER_MULTIPROCESSOR * 132


def step_bytes(
    config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype, *, is_eager: bool = False
) -> int:
    """Bytes that the backend takes beside weights, cache and the arrays that grow with max_seq_len only (`memory_budget`).
    is_eager: with operations in torch, without graphs."""
    kept = kept_bytes(config, model, dtype)
    kept += adapter_bytes(config, model, RankShare.of(model, parallel.rank, parallel.world_size), dtype)
    return kept + unallocated_bytes(config, model, parallel, dtype, is_eager=is_eager)


def unallocated_bytes(
    config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype, *, is_eager: bool = False
) -> int:
    """Of `step_bytes`, what the first steps allocate, and the cache block to which padding tokens write."""
    about = config, model, parallel, dtype
    spare_block = CacheShape.of(model, config.block_size, parallel, cache_dtype(config, dtype)).block_bytes
    return (_eager_bytes(*about) if is_eager else passing_bytes(*about)) + spare_block


def kept_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of tensors that stay: hidden states, logits, samples, samplers' buffers, rules, and a step's integers."""
    rows, vocab = config.max_step_samples, config.vocab_size
    hidden_states = max(config.max_step_tokens, rows) * model.dim * dtype.itemsize
    results = rows * (vocab * _FLOAT32 + _INT * (2 + min(MAX_TOP_LOGPROBS, vocab)))
    rules = (config.max_batch_size + 1) * _INT * table_words(vocab)
    numbers = _INT * (
        samples_size(rows) + received_size(config, LaunchShape.of_bucket(config.max_step_tokens, rows, 1))
    )
    masks = rows * 8 * (1 + bit_words(vocab))  # `MaskBuffers` on the device
    return hidden_states + results + rules + numbers + sampler_bytes(rows, vocab) + masks


def received_size(config: EngineConfig, largest: LaunchShape) -> int:
    """Integers of a step beside its samples, with room for the changes of slots that most steps bring, such as a long prompt's
    tokens and their places."""
    return largest.size + 4 * config.max_seq_len


def passing_bytes(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> int:
    """Bytes of tensors that live within a step, in the graphs' pool and, for steps without a graph, outside of it."""
    rows, largest = config.max_step_samples, config.max_step_tokens
    about, share = (config, model, parallel, dtype), RankShare.of(model, parallel.rank, parallel.world_size)
    # A smaller batch may need more memory: its splits' results are stored.
    split_decodes = min(rows, max_split_decode_tokens(len(share.kv_heads)))
    pool = max(
        _body_bytes(*about, max(largest, rows), rows),
        _body_bytes(*about, split_decodes, split_decodes),
        _head_bytes(model, parallel, dtype, rows),
    )
    without_graph = int(largest / LARGEST_PADDING)
    # Of prompt logprobs: logits in float32, and beside them a mask and ids of int32, and then their logarithms.
    logprobs = LOGITS_AT_A_TIME * config.vocab_size * (2 * _FLOAT32 + 1)
    eager = max(logprobs, _head_bytes(model, parallel, dtype, LOGITS_AT_A_TIME))
    if without_graph > CAPTURED_PROMPT_TOKENS[-1]:
        eager = max(eager, _body_bytes(*about, without_graph, split_decodes))
    return pool + eager + (LIBRARY_BYTES if parallel.device.type == "cuda" else 0)


def _eager_bytes(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> int:
    """Of operations in torch: activations in float32, gathered keys (twice, once transposed) and values, scores and weights in
    float32, the mask of a prompt, and logits as they are sorted and edited."""
    share, itemsize = RankShare.of(model, parallel.rank, parallel.world_size), dtype.itemsize
    heads = len(share.heads) + 2 * len(share.kv_heads)
    hidden = max(len(share.hidden), len(share.shared_hidden))
    activations = 4 * config.max_step_tokens * (4 * model.dim + 2 * heads * model.head_dim + 3 * hidden)
    keys = config.max_batch_size * config.max_seq_len
    gathered = 3 * keys * len(share.kv_heads) * model.head_dim * itemsize
    scores = 2 * keys * len(share.heads) * 4
    mask = min(config.max_step_tokens, config.max_seq_len) * config.max_seq_len * itemsize
    operations = [each for layer in dict.fromkeys(model.layers) for each in layer]
    if any(isinstance(each, Attend) and each.sinks is not None for each in operations):
        mask *= len(share.heads) + 1
    rows = config.max_step_tokens * max((each.top_k for each in operations if isinstance(each, Route)), default=0)
    experts = rows * 4 * 4 * (model.dim + len(share.expert_hidden)) + 12 * config.max_step_tokens * model.n_experts
    logits = config.max_step_samples * config.vocab_size * (itemsize + _SORTED)
    return activations + gathered + scores + mask + experts + logits


def _body_bytes(
    config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype, tokens: int, decodes: int
) -> int:
    """Bytes of the layers over `tokens` tokens, of which `decodes` are decode tokens, at their peak
    (`FusedTransformer.hidden_states`): the residual, the value before an operation, and what the operation makes."""
    share = RankShare.of(model, parallel.rank, parallel.world_size)
    dim = model.dim
    queries = len(share.heads) * model.head_dim
    projected = queries + 2 * len(share.kv_heads) * model.head_dim
    wide = tokens * dtype.itemsize
    # With batch_invariant, a token's sum over the ranks needs all ranks' parts and two sums in float32.
    in_order = config.batch_invariant and parallel.world_size > 1
    summed = tokens * dim * (parallel.world_size * dtype.itemsize + 2 * _FLOAT32) if in_order else wide * dim
    partial = _partial_bytes(config, model, share, min(tokens, decodes))
    most = value = rows = kept = 0  # bytes beside the residual; of the value, which is the residual at a layer's begin
    for operation in (each for layer in dict.fromkeys(model.layers) for each in layer):
        match operation:
            case Norm():
                made = after = wide * dim
            case Linear(is_summed=True):
                made, after = wide * dim + summed, wide * dim
            case Linear(parts=parts):
                made = after = wide * (projected + queries * (len(parts) > 3))
            case Attend(is_gated=is_gated):
                made, after = wide * queries * (1 + is_gated) + partial, wide * queries
            case Route(top_k=top_k):
                made, after = tokens * model.n_experts * 3 * _FLOAT32, value
                rows = tokens * top_k
            case GatedExperts():  # one expert's rows at a time, all of them at most
                made, after = rows * (dim + 3 * len(share.expert_hidden)) * dtype.itemsize, value
            case ExpertSum():
                made, after = rows * dim * 3 * _FLOAT32 + summed, wide * dim
            case GatedLinear(parts=(gate, _)):
                hidden = len(share.shared_hidden if gate.outputs == "shared_hidden" else share.hidden)
                made, after = 3 * wide * hidden, wide * hidden  # gate and up, and their gated product
            case Rotate(norms_all_heads=all_heads):  # in place, but for norms of all heads, and of gates
                is_copied = all_heads or value > wide * projected
                made, after = (2 * wide + tokens * _FLOAT32) * projected * is_copied, value
            case Add(multiplier):
                made, after = 0 if multiplier == 1.0 else wide * dim, 0
            case TokenGate():
                made = after = value
            case _:  # Again
                made, after, kept = 0, 0, wide * dim
        most, value = max(most, value + made), after
    shrunk = tokens * 4 * config.max_lora_rank * _FLOAT32 if config.max_loras else 0  # of q, k, v and gates
    return wide * dim + tokens * _INT + kept + most + shrunk


def _partial_bytes(config: EngineConfig, model: ModelConfig, share: RankShare, decodes: int) -> int:
    """Bytes of the splits' results in the attention of decodes, before they are combined, in the layer with the longest
    window."""
    if combines_in_kernel(decodes, len(share.kv_heads)):
        return 0
    positions = config.blocks_per_sequence * config.block_size
    splits = max(split_count(positions, window) for window in set(model.windows))
    return decodes * len(share.heads) * splits * (model.head_dim + 1) * _FLOAT32


def _head_bytes(model: ModelConfig, parallel: Parallel, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the hidden states and logits of a head, until the logits are gathered (`FusedTransformer.logits`)."""
    shares = [RankShare.of(model, rank, parallel.world_size) for rank in range(parallel.world_size)]
    widest, values = max(len(share.vocab) for share in shares), model.dim + len(shares[parallel.rank].vocab)
    if parallel.world_size > 1:
        values += model.vocab_size + (1 + parallel.world_size) * widest
    return rows * values * dtype.itemsize


def combines_in_kernel(num_decode_tokens: int, n_kv_heads: int) -> bool:
    """Whether the attention kernel combines the splits of decodes itself: it has enough programs with one for each decode token
    and key head. Independent of the GPU, because the memory plan uses it too."""
    return num_decode_tokens * n_kv_heads >= _FULL_PROGRAMS


def max_split_decode_tokens(n_kv_heads: int) -> int:
    """The largest number of decode tokens whose splits a kernel of its own combines."""
    return (_FULL_PROGRAMS - 1) // n_kv_heads


def split_of(position: int) -> int:
    """The split that has this position."""
    units = position // SPLIT_UNIT
    exponent = max(units.bit_length() - 1 - SPLIT_BITS, 0)
    return (exponent << SPLIT_BITS) + (units >> exponent)


def split_begin(split: int) -> int:
    """The first position of a split."""
    exponent = max((split >> SPLIT_BITS) - 1, 0)
    return ((split - (exponent << SPLIT_BITS)) << exponent) * SPLIT_UNIT


def split_count(num_positions: int, window: int) -> int:
    """Splits that one query sees at most, of so many positions. window: see `Attend`."""
    all_splits, window = split_of(num_positions - 1) + 1, abs(window)
    # As many as if all splits were as short as the first ones.
    return min(all_splits, (window + SPLIT_UNIT - 2) // SPLIT_UNIT + 1) if window else all_splits


def num_chunks(vocab: int) -> int:
    return -(-vocab // CHUNK)


def num_replicas(vocab: int) -> int:
    return min(MAX_REPLICAS, num_chunks(vocab))


def sampler_bytes(rows: int, vocab: int) -> int:
    """Bytes of `sampling_kernels.SamplingBuffers` and `logit_kernels.LogprobBuffers`."""
    chunks = num_chunks(vocab)
    sampling = 8 * (vocab + chunks + num_replicas(vocab) * BINS)
    logprobs = chunks * (4 + 8 * TOP_BLOCK)
    return rows * (sampling + logprobs)
