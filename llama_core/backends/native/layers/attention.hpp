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

// N queries of one sequence and one key/value head.
template <class T, int N>
void attend(const Query<T>* queries, const Cache<T>& cache, const Source& from, int head_dim, float scale) {
    constexpr int step = Dot<T>::kStep;
    alignas(64) float products[N][kChunk];
    alignas(64) T weights[N][kChunk];
    alignas(64) float sums[N][kMaxHeadDim];
    RunningSoftmax running[N];
    const Span span(queries, N);
    for (int n = 0; n < N; n++) running[n].begin(queries[n].sink), std::memset(sums[n], 0, head_dim * sizeof(float));
    for (int begin = span.first; begin <= span.last; begin = Span::after(begin)) {
        const Chunk<T> chunk(cache, from, head_dim, begin, span);
        if (chunk.count == kChunkTiles)
            multiply_keys<T, N, kChunkTiles>(queries, chunk.keys, head_dim, products);
        else
            for (int c = 0; c < chunk.count; c++)
                multiply_keys<T, N, 1>(queries, chunk.keys + c, head_dim, reinterpret_cast<float(*)[kChunk]>(&products[0][c * kKvTile]));
        for (int n = 0; n < N; n++) {
            const Query<T>& query = queries[n];
            const float shrink = running[n].add(products[n], scale, weights[n], chunk.count, begin, query.first, query.last);
            if (shrink != 1.0f)
                for (int d = 0; d < head_dim; d += kLanes) store(sums[n] + d, load(sums[n] + d) * splat(shrink));
        }
        int d = 0;
        const T* at[kChunkTiles];
        for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
            for (int c = 0; c < chunk.count; c++) at[c] = chunk.values[c] + d * step;
            add_values<T, N, 4>(weights, at, chunk.count, head_dim, sums[0] + d, kMaxHeadDim);
        }
        for (; d < head_dim; d += kLanes) {
            for (int c = 0; c < chunk.count; c++) at[c] = chunk.values[c] + d * step;
            add_values<T, N, 1>(weights, at, chunk.count, head_dim, sums[0] + d, kMaxHeadDim);
        }
    }
    for (int n = 0; n < N; n++)
        for (int d = 0; d < head_dim; d += kLanes) store(queries[n].out + d, load(sums[n] + d) * splat(1.0f / running[n].total));
}

// Any number of queries of one sequence and one key/value head. An AttentionTiles is alive.
template <class T>
void attend_all(const Query<T>* queries, int num, const Cache<T>& cache, const Source& from, int head_dim, float scale) {
#if defined(LLAMA_AMX)
    if constexpr (std::is_same_v<T, bf16>)
        if (head_dim % 32 == 0) {
            for (int n = 0; n < num; n += kTileQueries)
                attend_tiles(queries + n, std::min(kTileQueries, num - n), cache, from, head_dim, scale);
            return;
        }
#endif
    by_rows<4>(num, false, [&](auto n, auto, int first) { attend<T, n>(queries + first, cache, from, head_dim, scale); });
}

}  // namespace kernels
}  // namespace llama
