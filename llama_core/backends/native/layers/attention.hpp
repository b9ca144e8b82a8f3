// Attention over the paged cache, read in place: one pass over the keys and values with a running softmax.
#pragma once

#include "attention_tiles.hpp"
#include "linear.hpp"
#include "softmax_chunks.hpp"

namespace llama {
namespace kernels {

// Products of N queries with the keys of C KV tiles: products[n][tile * 16 + lane].
template <class T, int N, int C>
inline void multiply_keys(const Query<T>* queries, const T* const* kv_tiles, int head_dim, float (*products)[kChunk]) {
    constexpr int step = Dot<T>::kStep;
    Vec acc[N][C] = {};
    for (int d = 0; d < head_dim; d += step) UNROLL for (int n = 0; n < N; n++) {
            auto q = Dot<T>::broadcast(queries[n].q + d);
            UNROLL for (int c = 0; c < C; c++) acc[n][c] = Dot<T>::add(acc[n][c], kv_tiles[c] + d * kKvTile, q);
        }
    UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int c = 0; c < C; c++) store(products[n] + c * kKvTile, acc[n][c]);
}

// Adds the values of `count` KV tiles, weighted: sums[n][0 .. 16 D) += sum of weights[n][p] * values[p][..].
template <class T, int N, int D>
inline void add_values(const T (*weights)[kChunk], const T* const* kv_tiles, int count, int head_dim, float* sums, size_t stride) {
    constexpr int step = Dot<T>::kStep;
    Vec acc[N][D];
    UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int d = 0; d < D; d++) acc[n][d] = load(sums + n * stride + d * kLanes);
    for (int c = 0; c < count; c++)
        for (int p = 0; p < kKvTile; p += step)
            UNROLL for (int n = 0; n < N; n++) {
                auto weight = Dot<T>::broadcast(weights[n] + c * kKvTile + p);
                const T* row = kv_tiles[c] + size_t(p) * head_dim;
                UNROLL for (int d = 0; d < D; d++) acc[n][d] = Dot<T>::add(acc[n][d], row + d * kLanes * step, weight);
            }
    UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int d = 0; d < D; d++) store(sums + n * stride + d * kLanes, acc[n][d]);
}

// Adds a chunk to the sums [N][head_dim] of N queries.
template <class T, int N>
inline void add_chunk(const Query<T>* queries, const Chunk<T>& chunk, int head_dim, float scale, RunningSoftmax* running,
                      float* sums) {
    constexpr int step = Dot<T>::kStep;
    alignas(64) float products[N][kChunk];
    alignas(64) T weights[N][kChunk];
    if (chunk.count == kChunkTiles)
        multiply_keys<T, N, kChunkTiles>(queries, chunk.keys, head_dim, products);
    else
        for (int c = 0; c < chunk.count; c++)
            multiply_keys<T, N, 1>(queries, chunk.keys + c, head_dim, reinterpret_cast<float(*)[kChunk]>(&products[0][c * kKvTile]));
    for (int n = 0; n < N; n++) {
        const float shrink =
            running[n].add(products[n], scale, weights[n], chunk.count, chunk.begin, queries[n].first, queries[n].last);
        float* sum = sums + n * head_dim;
        if (shrink != 1.0f)
            for (int d = 0; d < head_dim; d += kLanes) store(sum + d, load(sum + d) * splat(shrink));
    }
    int d = 0;
    const T* at[kChunkTiles];
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
        for (int c = 0; c < chunk.count; c++) at[c] = chunk.values[c] + d * step;
        add_values<T, N, 4>(weights, at, chunk.count, head_dim, sums + d, head_dim);
    }
    for (; d < head_dim; d += kLanes) {
        for (int c = 0; c < chunk.count; c++) at[c] = chunk.values[c] + d * step;
        add_values<T, N, 1>(weights, at, chunk.count, head_dim, sums + d, head_dim);
    }
}

template <class T>
struct VectorQueries {
    static constexpr int kGroup = 4;
    const Query<T>* queries;
    const int head_dim;

    VectorQueries(const Query<T>* queries, int /*num*/, int head_dim) : queries(queries), head_dim(head_dim) {}
    void add(int first, int num, const Chunk<T>& chunk, float scale, RunningSoftmax* running, float* sums) {
        by_rows<kGroup>(num, false, [&](auto n, auto, int) {
            add_chunk<T, n>(queries + first, chunk, head_dim, scale, running + first, sums + first * head_dim);
        });
    }
    void finish() {}
};

// Each chunk of the cache is read once for all queries, by `Queries` in groups.
template <class Queries, class T>
inline void attend_by(const Query<T>* queries, int num, const Cache<T>& cache, const Source& from, int head_dim, float scale) {
    constexpr int kGroup = Queries::kGroup;
    Queries each(queries, num, head_dim);
    alignas(64) float sums[kMostQueries * kMaxHeadDim];  // rows are packed
    RunningSoftmax running[kMostQueries];
    Span groups[(kMostQueries + kGroup - 1) / kGroup];
    const Span span(queries, num);
    for (int n = 0; n < num; n++) running[n].begin(queries[n].sink, scale * kLog2E);
    for (int n = 0; n < num; n += kGroup) groups[n / kGroup] = Span(queries + n, std::min(kGroup, num - n));
    std::memset(sums, 0, num * head_dim * sizeof(float));
    for (int begin = span.first; begin <= span.last; begin = Span::after(begin)) {
        const Chunk<T> chunk(cache, from, head_dim, begin, span);
        for (int n = 0; n < num; n += kGroup) {
            const Span& group = groups[n / kGroup];
            if (!group.meets_chunk(begin)) continue;
            Chunk<T> seen = chunk;  // none of the KV tiles that only later tokens see: their values may be NaN
            seen.count = std::min(chunk.count, Chunk<T>::kv_tiles(begin, group.last));
            each.add(n, std::min(kGroup, num - n), seen, scale * kLog2E, running, sums);
        }
    }
    each.finish();
    for (int n = 0; n < num; n++) {
        const Vec inverse = splat(1.0f / sum(running[n].total));
        for (int d = 0; d < head_dim; d += kLanes) store(queries[n].out + d, load(sums + n * head_dim + d) * inverse);
    }
}

// Up to kMostQueries queries of one sequence and one key/value head. An AttentionTiles is alive.
template <class T>
void attend(const Query<T>* queries, int num, const Cache<T>& cache, const Source& from, int head_dim, float scale) {
#if defined(LLAMA_AMX)
    if constexpr (std::is_same_v<T, bf16>)
        if (head_dim % 32 == 0) return attend_by<TileQueries>(queries, num, cache, from, head_dim, scale);
#endif
    attend_by<VectorQueries<T>>(queries, num, cache, from, head_dim, scale);
}

}  // namespace kernels
}  // namespace llama
