// The attention of a step's rows in each layer: rotation, writes to the cache, and one task for each query tile and some heads.
#pragma once

#include "../step_plan.hpp"
#include "attention.hpp"
#include "rms_norm.hpp"
#include "rotary.hpp"

namespace llama {

template <class T>
class AttentionLayer {
  public:
    AttentionLayer(const Shape& s, const float* rotary)
        : shape_(s),
          head_dim_(int(round_up(s.head_dim, kLanes))),
          rotary_(s, head_dim_, rotary),
          queries_(s.max_tokens, size_t(s.heads) * head_dim_) {}

    void make_cache(int blocks) { cache_ = Cache<T>(shape_.layers, blocks, shape_.block_size, shape_.kv_heads, head_dim_); }
    size_t bytes() const { return rotary_.bytes() + queries_.bytes(); }  // without the cache

    // Rotates the queries and keys of 16 tokens; writes their keys and values to the cache. qkv: rows of queries, keys, values.
    // query_norm, key_norm [head_dim]: weights of the norms before the rotation, or null. `turns`: else they are not rotated.
    void rotate(int layer, int task, const StepPlan& plan, const Slots& slots, const Rows<T>& qkv, const T* query_norm,
                const T* key_norm, bool turns) const {
        const int begin = task * 16, end = std::min(plan.num_tokens(), begin + 16), width = query_width(shape_);
        for (int t = begin; t < end; t++)
            for (int h = 0; h < shape_.heads; h++)
                rotate_head(qkv[t] + h * shape_.head_dim, query_norm, plan.tokens[t].position, turns,
                            queries_[t] + h * head_dim_);
        alignas(64) T key[kernels::kMaxHeadDim];
        for (int h = 0; h < shape_.kv_heads; h++)
            for (int t = begin; t < end; t++) {
                const Token& token = plan.tokens[t];
                const int64_t* block_table = block_table_of(token.slot, slots);
                const T* k = qkv[t] + width + h * shape_.head_dim;
                const T* v = k + shape_.kv_heads * shape_.head_dim;
                rotate_head(k, key_norm, token.position, turns, key);
                cache_.write(layer, h, block_table, token.position, key, v);
                if (token.ends_new_kv_tile) cache_.clear_behind(layer, h, block_table, token.position);
            }
    }

    // Writes what one query tile attends to under some heads: out [tokens][heads * head_dim]. `window`: the latest positions that a
    // query sees, its own included; 0 for all. `scale`: of scores; 0 for 1 / sqrt(head_dim).
    void attend(int layer, int window, float scale, int task, const StepPlan& plan, const Slots& slots,
                const Rows<T>& out) const {
        const int tasks = plan.tasks_per_query_tile(shape_);
        const int begin = task % tasks * plan.heads_per_task, end = std::min(shape_.kv_heads, begin + plan.heads_per_task);
        const QueryTile& tile = plan.query_tiles[task / tasks];
        const kernels::AttentionTiles tiles((tile.end - tile.begin) * (shape_.heads / shape_.kv_heads));
        for (int kv_head = begin; kv_head < end; kv_head++) {
            const int next = kv_head + 1 < end ? kv_head + 1 : -1;
            attend_head(tile, {layer, kv_head, next, block_table_of(tile.slot, slots)}, window, scale, plan, out);
        }
    }

  private:
    static constexpr int kBatch = 16;  // queries that are multiplied with the keys together

    const int64_t* block_table_of(int slot, const Slots& slots) const {
        return slots.block_tables + size_t(slot) * shape_.blocks_per_sequence;
    }

    void rotate_head(const T* x, const T* norm, int position, bool turns, T* to) const {
        alignas(64) T normed[kernels::kMaxHeadDim];
        if (!turns) return copy_head(x, norm, to);
        if (norm) copy_head(x, norm, normed);
        rotary_.rotate_head(norm ? normed : x, position, to);
    }

    // One head, or its RMSNorm. The next head's values lie after x, so the vectors are loaded from a copy that ends with zeros.
    void copy_head(const T* x, const T* norm, T* to) const {
        std::fill(to + shape_.head_dim, to + head_dim_, T{});
        std::memcpy(static_cast<void*>(to), x, shape_.head_dim * sizeof(T));
        if (norm) rms_norm(to, norm, shape_.head_dim, shape_.norm_eps, to);
    }

    void attend_head(const QueryTile& tile, const kernels::Source& from, int window, float scale, const StepPlan& plan,
                     const Rows<T>& to) const {
        const int group = shape_.heads / shape_.kv_heads;
        if (!scale) scale = 1.0f / std::sqrt(float(shape_.head_dim));
        const bool direct = head_dim_ == shape_.head_dim;
        alignas(64) T spare[kBatch][kernels::kMaxHeadDim];
        Query<T> queries[kBatch];
        const int count = (tile.end - tile.begin) * group;
        for (int first = 0; first < count; first += kBatch) {
            const int num = std::min(kBatch, count - first);
            for (int i = 0; i < num; i++) {
                const int t = tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                T* out = to[t] + head * shape_.head_dim;
                const int last = plan.tokens[t].position;
                queries[i] = {queries_[t] + head * head_dim_, direct ? out : spare[i],
                              window ? std::max(0, last - window + 1) : 0, last};
            }
            kernels::attend_all(queries, num, cache_, from, head_dim_, scale);
            for (int i = 0; i < num && !direct; i++) {
                const int t = tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                std::memcpy(static_cast<void*>(to[t] + head * shape_.head_dim), spare[i], shape_.head_dim * sizeof(T));
            }
        }
    }

    const Shape shape_;
    const int head_dim_;  // padded to whole vectors
    const Rotary rotary_;
    const Activations<T> queries_;
    Cache<T> cache_;
};

}  // namespace llama
