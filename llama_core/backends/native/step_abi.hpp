// The structs and the tables of names that cross the C interface. llama_core/backends/native/library.py mirrors them.
#pragma once

#include "abi.hpp"
#include "base/memory.hpp"
#include "sampling.hpp"

namespace llama {

// Shapes of this rank. `heads`, `kv_heads` and `hidden` are this rank's part; `dim` and `full_vocab` are whole. `bfloat16`: the
// activations are bfloat16, else float32. `max_tokens` and `max_samples` are limits of one step. The last four are switches.
// clang-format off
#define LLAMA_SHAPE(field)                                                                                                    \
    field(int32_t, dim) field(int32_t, layers) field(int32_t, heads) field(int32_t, kv_heads) field(int32_t, head_dim)        \
    field(int32_t, hidden) field(int32_t, full_vocab) field(int32_t, rank) field(int32_t, ranks)                              \
    field(int32_t, bfloat16) field(int32_t, max_tokens) field(int32_t, max_samples) field(int32_t, max_seq_len)               \
    field(int32_t, block_size) field(int32_t, blocks_per_sequence) field(int32_t, threads) field(float, norm_eps)             \
    field(int32_t, attention_bias) field(int32_t, attention_out_bias) field(int32_t, mlp_bias) field(int32_t, qk_norm)
// clang-format on
LLAMA_DEFINE_STRUCT(Shape, LLAMA_SHAPE)

// The arrays of llama_core/backends/slots.py's SlotTable, indexed by slot. Python fills them and steps read them. tokens:
// [slots][max_seq_len], to which steps add the sampled tokens; block_tables: [slots][blocks_per_sequence]; sampling: [slots];
// rules: [slots], null where a slot has none.
// clang-format off
#define LLAMA_SLOTS(field)                                                                                                    \
    field(int64_t*, tokens) field(const int64_t*, block_tables) field(const SlotSampling*, sampling)                          \
    field(const LogitRules* const*, rules)
// clang-format on
LLAMA_DEFINE_STRUCT(Slots, LLAMA_SLOTS)

// Tokens start .. start + length of a slot. A token is sampled after each of the last `samples` of them.
#define LLAMA_ROW(field) field(int32_t, slot) field(int32_t, start) field(int32_t, length) field(int32_t, samples)
LLAMA_DEFINE_STRUCT(Row, LLAMA_ROW)

// The weights of a checkpoint by their names in it, without ".weight".
// clang-format off
#define LLAMA_WEIGHTS(entry)                                                                                                  \
    entry(kEmbedding, "tok_embeddings") entry(kQuery, "attention.wq") entry(kKey, "attention.wk")                             \
    entry(kValue, "attention.wv") entry(kOut, "attention.wo") entry(kGate, "feed_forward.w1")                                 \
    entry(kDown, "feed_forward.w2") entry(kUp, "feed_forward.w3") entry(kAttentionNorm, "attention_norm")                     \
    entry(kFfnNorm, "ffn_norm") entry(kFinalNorm, "norm") entry(kHead, "output")                                              \
    entry(kQueryBias, "attention.wq.bias") entry(kKeyBias, "attention.wk.bias") entry(kValueBias, "attention.wv.bias")        \
    entry(kOutBias, "attention.wo.bias") entry(kGateBias, "feed_forward.w1.bias") entry(kDownBias, "feed_forward.w2.bias")    \
    entry(kUpBias, "feed_forward.w3.bias") entry(kQueryNorm, "attention.q_norm") entry(kKeyNorm, "attention.k_norm")
// clang-format on
enum Weight { LLAMA_WEIGHTS(LLAMA_ENUMERATOR) };

// The phases of a step, by the names under which the engine reports their seconds.
// clang-format off
#define LLAMA_OPS(entry)                                                                                                      \
    entry(kEmbed, "embed") entry(kShareEmbedding, "share embedding") entry(kJoinEmbedding, "join embedding")                  \
    entry(kNormAttention, "norm before attention") entry(kProjectQkv, "project q, k, v")                                      \
    entry(kRotate, "rotate, write cache") entry(kAttend, "attend") entry(kQuantizeAttended, "quantize attended")              \
    entry(kProjectOut, "project out") entry(kShareOut, "share out") entry(kAddOut, "add out")                                 \
    entry(kNormFfn, "norm before ffn") entry(kGateUp, "gate and up") entry(kQuantizeHidden, "quantize hidden")                \
    entry(kProjectDown, "project down") entry(kShareDown, "share down") entry(kAddDown, "add down")                           \
    entry(kNormFinal, "norm at the end") entry(kLogits, "logits") entry(kShareLogits, "share logits")                         \
    entry(kJoinLogits, "join logits") entry(kSample, "sample") entry(kShareSampled, "share sampled")
// clang-format on
enum Op { LLAMA_OPS(LLAMA_ENUMERATOR) kPack, kNumOps };

// One line for each struct and table, in the form of library.py's _description.
inline std::string describe_abi() {
    std::string text = describe_Shape() + "\n" + describe_Slots() + "\n" + describe_SlotSampling() + "\n" + describe_Row() +
                       "\n" + describe_LogitRules() + "\n" + describe_TokenMask();
    text += "\nWeight";
    LLAMA_WEIGHTS(LLAMA_DESCRIBE_ENTRY)
    text += "\nOp";
    LLAMA_OPS(LLAMA_DESCRIBE_ENTRY)
    return text;
}

// Widths on this rank.
inline int query_width(const Shape& s) { return s.heads * s.head_dim; }
inline int kv_width(const Shape& s) { return s.kv_heads * s.head_dim; }

// The indices begin .. begin + size of a dimension that one rank has.
struct Part {
    size_t begin, size;
};
// rank_share.py's even_part: `size` things given out to the ranks as evenly as they come.
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
