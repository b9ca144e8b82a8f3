// The attention of a step's rows in each layer: rotation, writes to the cache, and one task for each query tile and some heads.
#pragma once

#include "attention.hpp"
#include "rotary.hpp"
#include "step_plan.hpp"

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
    void rotate(int layer, int task, const StepPlan& plan, const Slots& slots, const Rows<T>& qkv) const {
        const int begin = task * 16, end = std::min(plan.num_tokens(), begin + 16), width = query_width(shape_);
        for (int t = begin; t < end; t++)
            for (int h = 0; h < shape_.heads; h++)
                rotary_.rotate_head(qkv[t] + h * shape_.head_dim, plan.tokens[t].position, queries_[t] + h * head_dim_);
        alignas(64) T key[kernels::kMaxHeadDim];
        for (int h = 0; h < shape_.kv_heads; h++)
            for (int t = begin; t < end; t++) {
                const Token& token = plan.tokens[t];
                const int64_t* block_table = block_table_of(token.slot, slots);
                const T* k = qkv[t] + width + h * shape_.head_dim;
                const T* v = k + shape_.kv_heads * shape_.head_dim;
                rotary_.rotate_head(k, token.position, key);
                cache_.write(layer, h, block_table, token.position, key, v);
                if (token.ends_new_kv_tile) cache_.clear_behind(layer, h, block_table, token.position);
            }
    }

    // Writes what one query tile attends to under some heads: out [tokens][heads * head_dim].
    void attend(int layer, int task, const StepPlan& plan, const Slots& slots, const Rows<T>& out) const {
        const int tasks = plan.tasks_per_query_tile(shape_);
        const int begin = task % tasks * plan.heads_per_task, end = std::min(shape_.kv_heads, begin + plan.heads_per_task);
        const QueryTile& tile = plan.query_tiles[task / tasks];
        const kernels::AttentionTiles tiles((tile.end - tile.begin) * (shape_.heads / shape_.kv_heads));
        for (int kv_head = begin; kv_head < end; kv_head++) {
            const int next = kv_head + 1 < end ? kv_head + 1 : -1;
            attend_head(tile, {layer, kv_head, next, block_table_of(tile.slot, slots)}, plan, out);
        }
    }

  private:
    static constexpr int kBatch = 16;  // queries that are multiplied with the keys together

    const int64_t* block_table_of(int slot, const Slots& slots) const {
        return slots.block_tables + size_t(slot) * shape_.blocks_per_sequence;
    }

    void attend_head(const QueryTile& tile, const kernels::Source& from, const StepPlan& plan, const Rows<T>& to) const {
        const int group = shape_.heads / shape_.kv_heads;
        const float scale = 1.0f / std::sqrt(float(shape_.head_dim));
        const bool direct = head_dim_ == shape_.head_dim;
        alignas(64) T spare[kBatch][kernels::kMaxHeadDim];
        Query<T> queries[kBatch];
        const int count = (tile.end - tile.begin) * group;
        for (int first = 0; first < count; first += kBatch) {
            const int num = std::min(kBatch, count - first);
            for (int i = 0; i < num; i++) {
                const int t = tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                T* out = to[t] + head * shape_.head_dim;
                queries[i] = {queries_[t] + head * head_dim_, direct ? out : spare[i], plan.tokens[t].position};
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
