// What attention on vectors and on tile registers share: queries, the running softmax, and chunks of the cache.
//
// After "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018) and FlashAttention (Dao et al. 2022). Keys
// are taken in chunks that begin at multiples of 64 positions for every query, so a query's result does not depend on whether
// it was computed alone (decode) or among others (prefill), nor on the chunks of its prompt.
#pragma once

#include <algorithm>
#include <climits>
#include <limits>

#include "../base/simd.hpp"
#include "kv_cache.hpp"

namespace llama {

constexpr int kChunk = 64;  // positions whose scores are known before any value is read
constexpr int kChunkTiles = kChunk / kKvTile;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// One query: q [head_dim] rotated, sees positions first .. last of its sequence, both included; out [head_dim]. `sink`: the score of
// a position without a value, kLowest for none.
template <class T>
struct Query {
    const T* q;
    T* out;
    int first, last;
    float sink;
};

namespace kernels {

constexpr int kMaxHeadDim = 512;

constexpr float kLog2E = 1.44269504f;

// The running softmax of one query: the greatest score so far, and each lane's sum of 2^(score - greatest). A score is a product
// of query and key times `scale`, which is positive and includes log2(e); `most` is a product.
struct RunningSoftmax {
    Vec total;
    float most;

    void begin(float sink, float scale) { most = sink * kLog2E / scale, total = Vec{sink > kLowest ? 1.0f : 0.0f}; }

    // Adds the products of `count` KV tiles that begin at position `begin`; the query sees positions first .. last. Writes the
    // weights of these tiles, and returns the factor by which the caller multiplies its earlier sums.
    template <class T>
    float add(const float* products, float scale, T* weights, int count, int begin, int first, int last) {
        const int end = begin + count * kKvTile;
        if (first <= begin && last >= end - 1) return add_seen<false>(products, scale, weights, count, 0, 0);
        if (first < end && last >= begin) return add_seen<true>(products, scale, weights, count, first - begin, last - begin);
        std::fill(weights, weights + count * kKvTile, T{});  // another query of the group sees these positions
        return 1.0f;
    }

  private:
    // `first` and `last`: the positions that the query sees, if HidesSome, from the first one on.
    template <bool HidesSome, class T>
    float add_seen(const float* products, float scale, T* weights, int count, int first, int last) {
        static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const IVec lanes = load_as<IVec>(kNumbers);
        Vec seen[kChunkTiles], highest = splat(kLowest);
        for (int c = 0; c < count; c++) {
            seen[c] = load(products + c * kKvTile);
            if constexpr (HidesSome) seen[c] = select(is_seen(lanes, c, first, last), seen[c], splat(kLowest));
            highest = max(highest, seen[c]);
        }
        float shrink = 1.0f;
        if (any(highest > splat(most))) {
            const float now = max(highest);
            shrink = exp2(splat((most - now) * scale))[0];
            most = now;
            total = total * splat(shrink);
        }
        Vec sums = total;
        for (int c = 0; c < count; c++) {
            Vec weight = exp2((seen[c] - splat(most)) * splat(scale));
            if constexpr (HidesSome) weight = select(is_seen(lanes, c, first, last), weight, Vec{});
            store(weights + c * kKvTile, weight);
            sums += weight;
        }
        total = sums;
        return shrink;
    }

    static IVec is_seen(IVec lanes, int c, int first, int last) {
        return (lanes >= first - c * kKvTile) & (lanes <= last - c * kKvTile);
    }
};

// The keys and values that a call of `attend` reads: one sequence's under one head. `next_head`: the head to prefetch, or -1.
struct Source {
    int layer, head, next_head;
    const int64_t* block_table;
};

// The positions that the queries of a call of `attend` see together, from the KV tile of the first: first .. last.
struct Span {
    int first = INT_MAX, last = 0;

    Span() = default;
    template <class T>
    Span(const Query<T>* queries, int num) {
        for (int n = 0; n < num; n++) first = std::min(first, queries[n].first), last = std::max(last, queries[n].last);
        first = first / kKvTile * kKvTile;
    }
    bool meets_chunk(int begin) const { return begin <= last && after(begin) > first; }
    // The first position of the chunk after the one of `begin`: chunks end at multiples of kChunk.
    static int after(int begin) { return begin / kChunk * kChunk + kChunk; }
};

// The addresses of a chunk's KV tiles from position `begin`. The constructor prefetches its values and the keys of the next
// chunk. Only positions of `span` are looked up in the block table: the blocks before it may have been freed.
template <class T>
struct Chunk {
    int begin, count;
    const T *keys[kChunkTiles], *values[kChunkTiles];

    Chunk(const Cache<T>& cache, const Source& from, int head_dim, int begin, const Span& span)
        : begin(begin), count(kv_tiles(begin, span.last)) {
        for (int c = 0; c < count; c++) {
            keys[c] = cache.keys(from.layer, from.head, from.block_table, begin + c * kKvTile);
            values[c] = cache.values(from.layer, from.head, from.block_table, begin + c * kKvTile);
            prefetch_tile(values[c], head_dim);
        }
        const bool more = Span::after(begin) <= span.last;
        const int next_head = more ? from.head : from.next_head, next = more ? Span::after(begin) : span.first;
        if (next_head < 0) return;
        for (int c = 0; c < kv_tiles(next, span.last); c++)
            prefetch_tile(cache.keys(from.layer, next_head, from.block_table, next + c * kKvTile), head_dim);
    }

    static int kv_tiles(int begin, int last) { return (std::min(last, Span::after(begin) - 1) - begin) / kKvTile + 1; }

  private:
    static void prefetch_tile(const T* kv_tile, int head_dim) {
        const char* p = reinterpret_cast<const char*>(kv_tile);
        for (int line = 0; line < int(kKvTile * head_dim * sizeof(T)); line += 64) __builtin_prefetch(p + line);
    }
};

}  // namespace kernels
}  // namespace llama
