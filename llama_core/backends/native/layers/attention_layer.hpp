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
        : shape_(s), head_dim_(int(round_up(s.head_dim, kLanes))), queries_(s.max_tokens, size_t(s.heads) * head_dim_) {
        for (int i = 0; i < s.tables; i++) rotary_.emplace_back(s, head_dim_, rotary + size_t(i) * s.max_seq_len * s.head_dim);
    }

    void make_cache(int blocks) { cache_ = Cache<T>(shape_.layers, blocks, shape_.block_size, shape_.kv_heads, head_dim_); }
    // Without the cache.
    size_t bytes() const {
        size_t total = queries_.bytes();
        for (const Rotary& each : rotary_) total += each.bytes();
        return total;
    }

    // What happens to a token's queries, or to its keys, before attention. `together`: the norm is of all heads, whose inverse
    // this is, with weights for each head. `rotary`: null for no rotation.
    struct Change {
        RmsNorm<T> norm;
        const Rotary* rotary = nullptr;
        bool together = false;
        float inverse = 0;
    };
    const Rotary* table(int number) const { return number ? &rotary_[number - 1] : nullptr; }

    // The sums of squares of a token's queries and of its keys, which other ranks have no copy of.
    void squares(const T* qkv, float* sums) const {
        alignas(64) T head[kernels::kMaxHeadDim];
        sums[0] = sums[1] = 0;
        for (int h = 0; h < shape_.heads + shape_.kv_heads * shape_.has_first_copies; h++) {
            copy_head(qkv + h * shape_.head_dim, head);
            sums[h >= shape_.heads] += sum_of_squares(head, head_dim_);
        }
    }

    // Changes the queries and keys of 16 tokens; writes their keys and values to the cache. qkv: rows of queries, keys, values.
    // `changes`: token -> those of its queries and of its keys.
    template <class F>
    void rotate(int layer, int task, const StepPlan& plan, const Slots& slots, const Rows<T>& qkv, F&& changes) const {
        const int begin = task * 16, end = std::min(plan.num_tokens(), begin + 16), width = query_width(shape_);
        Change keys[16];
        for (int t = begin; t < end; t++) {
            const auto [query, key] = changes(t);
            keys[t - begin] = key;
            for (int h = 0; h < shape_.heads; h++)
                change_head(qkv[t] + h * shape_.head_dim, h, query, plan.tokens[t].position, queries_[t] + h * head_dim_);
        }
        alignas(64) T key[kernels::kMaxHeadDim];
        for (int h = 0; h < shape_.kv_heads; h++)
            for (int t = begin; t < end; t++) {
                const Token& token = plan.tokens[t];
                const int64_t* block_table = block_table_of(token.slot, slots);
                const T* k = qkv[t] + width + h * shape_.head_dim;
                const T* v = k + shape_.kv_heads * shape_.head_dim;
                change_head(k, h, keys[t - begin], token.position, key);
                cache_.write(layer, h, block_table, token.position, key, v);
                if (token.ends_new_kv_tile) cache_.clear_behind(layer, h, block_table, token.position);
            }
    }

    // Writes what one query tile attends to under some heads: out [tokens][heads * head_dim]. `window`: the latest positions that a
    // query sees, its own included; 0 for all; if negative, those in its chunk of -window positions. `scale`: of scores; 0 for
    // 1 / sqrt(head_dim). `sinks`: of each head, or null.
    void attend(int layer, int window, float scale, const T* sinks, int task, const StepPlan& plan, const Slots& slots,
                const Rows<T>& out) const {
        const int tasks = plan.tasks_per_query_tile(shape_);
        const int begin = task % tasks * plan.heads_per_task, end = std::min(shape_.kv_heads, begin + plan.heads_per_task);
        const QueryTile& tile = plan.query_tiles[task / tasks];
        const kernels::AttentionTiles tiles((tile.end - tile.begin) * (shape_.heads / shape_.kv_heads));
        for (int kv_head = begin; kv_head < end; kv_head++) {
            const int next = kv_head + 1 < end ? kv_head + 1 : -1;
            attend_head(tile, {layer, kv_head, next, block_table_of(tile.slot, slots)}, window, scale, sinks, plan, out);
        }
    }

  private:
    const int64_t* block_table_of(int slot, const Slots& slots) const {
        return slots.block_tables + size_t(slot) * shape_.blocks_per_sequence;
    }

    void change_head(const T* x, int head, const Change& by, int position, T* to) const {
        alignas(64) T normed[kernels::kMaxHeadDim], weights[kernels::kMaxHeadDim];
        const bool norms = by.norm.eps > 0;
        if (!by.rotary && !norms) return copy_head(x, to);
        if (norms) {
            T* result = by.rotary ? normed : to;
            copy_head(x, result);
            RmsNorm<T> norm = by.norm;
            if (by.together) {
                copy_head(norm.weights + head * shape_.head_dim, weights);
                norm.weights = weights;
                norm.scale(result, head_dim_, by.inverse, result);
            } else {
                norm(result, shape_.head_dim, result);
            }
        }
        if (by.rotary) by.rotary->rotate_head(norms ? normed : x, position, to);
    }

    // The next head's values lie after x, so the vectors of a head are loaded from a copy that ends with zeros.
    void copy_head(const T* x, T* to) const {
        std::fill(to + shape_.head_dim, to + head_dim_, T{});
        std::memcpy(static_cast<void*>(to), x, shape_.head_dim * sizeof(T));
    }

    static int first_seen(int position, int window) {
        if (window < 0) return position / -window * -window;
        return window ? std::max(0, position - window + 1) : 0;
    }

    void attend_head(const QueryTile& tile, const kernels::Source& from, int window, float scale, const T* sinks,
                     const StepPlan& plan, const Rows<T>& to) const {
        const int group = shape_.heads / shape_.kv_heads;
        if (!scale) scale = 1.0f / std::sqrt(float(shape_.head_dim));
        const bool direct = head_dim_ == shape_.head_dim;
        alignas(64) T spare[kMostQueries][kernels::kMaxHeadDim];
        Query<T> queries[kMostQueries];
        const int count = (tile.end - tile.begin) * group;
        for (int first = 0; first < count; first += kMostQueries) {
            const int num = std::min(kMostQueries, count - first);
            for (int i = 0; i < num; i++) {
                const int t = tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                T* out = to[t] + head * shape_.head_dim;
                const int last = plan.tokens[t].position;
                queries[i] = {queries_[t] + head * head_dim_, direct ? out : spare[i], first_seen(last, window), last,
                              sinks ? widen(sinks[head]) : kLowest};
            }
            kernels::attend(queries, num, cache_, from, head_dim_, scale);
            for (int i = 0; i < num && !direct; i++) {
                const int t = tile.begin + (first + i) / group, head = from.head * group + (first + i) % group;
                std::memcpy(static_cast<void*>(to[t] + head * shape_.head_dim), spare[i], shape_.head_dim * sizeof(T));
            }
        }
    }

    const Shape shape_;
    const int head_dim_;  // padded to whole vectors
    std::vector<Rotary> rotary_;
    const Activations<T> queries_;
    Cache<T> cache_;
};

}  // namespace llama
