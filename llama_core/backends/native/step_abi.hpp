// The structs that cross the C interface. llama_core/backends/native/library.py mirrors them.
#pragma once

#include "abi.hpp"
#include "base/memory.hpp"
#include "sampling.hpp"

namespace llama {

// Shapes of this rank. `heads`, `kv_heads` and `hidden` are this rank's part; `dim` and `full_...` are whole. `has_first_copies`:
// no rank before has a copy of this rank's key/value heads. `tables`: rotary tables. `sampler`: the rank that samples for all.
// `bfloat16`: the activations are bfloat16, else float32. `max_tokens` and `max_samples` are limits of one
// step. `max_loras`: adapters that the rank holds at once. `embedding_multiplier`, `logits_divisor`, `logits_cap` (0 for none): see
// llama_core/model/config.py.
// clang-format off
#define LLAMA_SHAPE(field)                                                                                                    \
    field(int32_t, dim) field(int32_t, layers) field(int32_t, heads) field(int32_t, kv_heads) field(int32_t, head_dim)        \
    field(int32_t, full_heads) field(int32_t, full_kv_heads) field(int32_t, has_first_copies) field(int32_t, tables)          \
    field(int32_t, hidden) field(int32_t, full_vocab) field(int32_t, rank) field(int32_t, ranks) field(int32_t, sampler)      \
    field(int32_t, bfloat16) field(int32_t, max_tokens) field(int32_t, max_samples) field(int32_t, max_seq_len)               \
    field(int32_t, block_size) field(int32_t, blocks_per_sequence) field(int32_t, threads) field(int32_t, max_loras)          \
    field(int32_t, max_lora_rank) field(float, embedding_multiplier) field(float, logits_divisor) field(float, logits_cap)
// clang-format on
LLAMA_DEFINE_STRUCT(Shape, LLAMA_SHAPE)

// The arrays of llama_core/backends/slots.py's SlotTable, indexed by slot. Python fills them and steps read them. tokens:
// [slots][max_seq_len], to which steps add the sampled tokens; block_tables: [slots][blocks_per_sequence]; sampling: [slots];
// rules: [slots], null where a slot has none; adapter_places: [slots], 0 where a slot has no adapter.
// clang-format off
#define LLAMA_SLOTS(field)                                                                                                    \
    field(int64_t*, tokens) field(const int64_t*, block_tables) field(const SlotSampling*, sampling)                          \
    field(const LogitRules* const*, rules) field(const int64_t*, adapter_places)
// clang-format on
LLAMA_DEFINE_STRUCT(Slots, LLAMA_SLOTS)

// Tokens start .. start + length of a slot. A token is sampled after each of the last `samples` of them.
#define LLAMA_ROW(field) field(int32_t, slot) field(int32_t, start) field(int32_t, length) field(int32_t, samples)
LLAMA_DEFINE_STRUCT(Row, LLAMA_ROW)

// A tensor of this rank's weights: a matrix [outputs][inputs], an embedding, or a vector [rows][1]. Tensors are numbered from 1.
// clang-format off
#define LLAMA_TENSOR(field) field(int32_t, rows) field(int32_t, columns)
LLAMA_DEFINE_STRUCT(Tensor, LLAMA_TENSOR)

// A weight's part on this rank, [rows][columns], and the tensor that holds it from row `first`.
#define LLAMA_WEIGHT_PART(field) field(int32_t, tensor) field(int32_t, first) field(int32_t, rows) field(int32_t, columns)
LLAMA_DEFINE_STRUCT(WeightPart, LLAMA_WEIGHT_PART)

// An operation of llama_core/backends/native/program.py, which says what each kind does. `tensor`, `other`: tensors by number, 0
// for none. `from`, `to`: buffers. `query_table`, `key_table`: rotary tables by number, 0 for none.
#define LLAMA_OPERATION(field)                                                                                                \
    field(int32_t, kind) field(int32_t, from) field(int32_t, to) field(int32_t, tensor) field(int32_t, other)                 \
    field(int32_t, layer) field(int32_t, window) field(int32_t, query_table) field(int32_t, key_table) field(int32_t, variant) \
    field(int32_t, experts) field(int32_t, chosen)                                                                            \
    field(float, factor) field(float, eps) field(float, offset)
LLAMA_DEFINE_STRUCT(Operation, LLAMA_OPERATION)
#define LLAMA_KINDS(entry)                                                                                                    \
    entry(kEmbedding, "embedding") entry(kNorm, "norm") entry(kLinear, "linear") entry(kGatedLinear, "gated_linear")          \
    entry(kRotation, "rotation") entry(kAttention, "attention") entry(kRoute, "route") entry(kExpertGates, "expert_gates")    \
    entry(kExpertSum, "expert_sum") entry(kTokenGate, "token_gate") entry(kAddition, "addition") entry(kHead, "head")
enum Kind { LLAMA_KINDS(LLAMA_ENUMERATOR) };
#define LLAMA_BUFFERS(entry)                                                                                                  \
    entry(kResidual, "residual") entry(kNormed, "normed") entry(kQkv, "qkv") entry(kAttended, "attended")                     \
    entry(kGated, "gated") entry(kProjected, "projected") entry(kShared, "shared")
enum Buffer { LLAMA_BUFFERS(LLAMA_ENUMERATOR) };
#define LLAMA_VARIANTS(entry) \
    entry(kPlain, "plain") entry(kGeluTanh, "gelu_tanh") entry(kAllHeads, "all_heads") entry(kSigmoidGate, "sigmoid_gate") \
    entry(kScoresAll, "scores_all") entry(kClampedSwiglu, "clamped_swiglu") entry(kScalesInputs, "scales_inputs")
enum Variant { LLAMA_VARIANTS(LLAMA_ENUMERATOR) };
// clang-format on

// The phases of a step.
enum Op {
    kEmbed,
    kShareEmbedding,
    kJoinEmbedding,
    kNormTokens,
    kQuantize,
    kShrink,
    kProject,
    kShareSum,
    kJoinSum,
    kSquareHeads,
    kShareSquares,
    kRotate,
    kAttend,
    kGateHeads,
    kScoreExperts,
    kChooseExperts,
    kGroupExperts,
    kGatherExperts,
    kGateExperts,
    kQuantizeExperts,
    kProjectExperts,
    kSumExperts,
    kGateTokens,
    kAdd,
    kNormFinal,
    kLogits,
    kShareLogits,
    kJoinLogits,
    kSample,
    kShareSampled,
    kPack
};

// One line for each struct and enum, in the form of library.py's _description.
inline std::string describe_abi() {
    return describe_Shape() + "\n" + describe_Slots() + "\n" + describe_SlotSampling() + "\n" + describe_Row() + "\n" +
           describe_Tensor() + "\n" + describe_WeightPart() + "\n" + describe_Operation() + "\n" + describe_LogitRules() +
           "\n" + describe_TokenMask() +
           "\nKind" LLAMA_KINDS(LLAMA_WORD) "\nBuffer" LLAMA_BUFFERS(LLAMA_WORD) "\nVariant" LLAMA_VARIANTS(LLAMA_WORD);
}

// Widths on this rank.
inline int query_width(const Shape& s) { return s.heads * s.head_dim; }
inline int kv_width(const Shape& s) { return s.kv_heads * s.head_dim; }

// The indices begin .. begin + size of a dimension that one rank has.
struct Part {
    size_t begin, size;
};
// model/share.py's even_part: `size` things given out to the ranks as evenly as they come.
inline Part even_part(int64_t size, int rank, int ranks) {
    const int64_t begin = size * rank / ranks;
    return {size_t(begin), size_t(size * (rank + 1) / ranks - begin)};
}
// The part of the rank that has most.
inline size_t largest_part(int64_t size, int ranks) { return size_t((size + ranks - 1) / ranks); }
inline Part embedding_part(const Shape& s, int rank) { return even_part(s.dim, rank, s.ranks); }
inline Part vocab_part(const Shape& s, int rank) { return even_part(s.full_vocab, rank, s.ranks); }
inline int round16(int n) { return int(round_up(n, 16)); }

}  // namespace llama
