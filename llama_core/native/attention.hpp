// Attention over the paged cache, read where it lies: one pass over the keys and values with a running softmax.
//
// After "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018) and FlashAttention (Dao et al. 2022). Keys
// are taken in chunks that begin at multiples of 64 positions, whoever asks, so a query's result does not depend on
// whether it was computed alone (decode) or among others (prefill), nor on how its prompt was cut.
//
// Cache of one layer: [block][kv head][block_size / 16] cells of 16 positions, so that a lane is a position for keys and a
// dimension for values. In a cell, with `step` = 1 (float32) or 2 (bfloat16) elements multiplied at once:
//   keys   [head_dim / step][16 positions][step]
//   values [16 / step][head_dim][step]
#pragma once

#include <algorithm>
#include <limits>

#include "linear.hpp"

namespace llama {

constexpr int kCell = 16;   // positions
constexpr int kChunk = 64;  // positions whose scores are known before any value is read
constexpr int kCells = kChunk / kCell;

// Keys and values of all layers. head_dim is padded to whole vectors.
template <class T>
class Cache {
  public:
    Cache() = default;
    Cache(int layers, int blocks, int block_size, int kv_heads, int head_dim)
        : block_size_(block_size), head_dim_(head_dim), cell_(size_t(kCell) * head_dim) {
        head_ = cell_ * (block_size / kCell);
        block_ = head_ * kv_heads;
        layer_ = block_ * blocks;
        keys_ = Memory(layer_ * layers * sizeof(T));
        values_ = Memory(layer_ * layers * sizeof(T));
    }

    size_t bytes() const { return keys_.bytes() + values_.bytes(); }
    int block_size() const { return block_size_; }

    T* keys(int layer, int head, const int64_t* table, int position) const { return keys_.as<T>() + at(layer, head, table, position); }
    T* values(int layer, int head, const int64_t* table, int position) const { return values_.as<T>() + at(layer, head, table, position); }

    void write(int layer, int head, const int64_t* table, int position, const T* key, const T* value) const {
        constexpr int step = Dot<T>::kStep;
        const int lane = position % kCell;
        T* k = keys(layer, head, table, position) + lane * step;
        T* v = values(layer, head, table, position);
        // What the cell's last owner left must not reach anyone: a weight of zero times its NaN would be NaN.
        if (lane == 0) std::memset(static_cast<void*>(v), 0, cell_ * sizeof(T));
        for (int d = 0; d < head_dim_; d += step)
            for (int i = 0; i < step; i++) k[d * kCell + i] = key[d + i];
        v += size_t(lane / step) * head_dim_ * step + lane % step;
        for (int d = 0; d < head_dim_; d++) v[d * step] = value[d];
    }

  private:
    size_t at(int layer, int head, const int64_t* table, int position) const {
        return layer * layer_ + table[position / block_size_] * block_ + head * head_ + position % block_size_ / kCell * cell_;
    }
    int block_size_ = 0, head_dim_ = 0;
    size_t cell_ = 0, head_ = 0, block_ = 0, layer_ = 0;
    Memory keys_, values_;
};

// One query: q [head_dim] rotated, sees positions 0 .. last of its sequence; out [head_dim].
template <class T>
struct Query {
    const T* q;
    T* out;
    int last;
};

namespace kernels {

// Scores of N queries against C cells: scores[n][cell * 16 + lane].
template <class T, int N, int C>
inline void score(const Query<T>* queries, const T* const* cells, int head_dim, float scale, float (*scores)[kChunk]) {
    constexpr int step = Dot<T>::kStep;
    Vec acc[N][C] = {};
    for (int d = 0; d < head_dim; d += step)
        for (int n = 0; n < N; n++) {
            auto q = Dot<T>::broadcast(queries[n].q + d);
            for (int c = 0; c < C; c++) acc[n][c] = Dot<T>::add(acc[n][c], cells[c] + d * kCell, q);
        }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) store(scores[n] + c * kCell, acc[n][c] * splat(scale));
}

// Adds the values of `count` cells, weighted: sums[n][0 .. 16 D) += sum of weights[n][p] * values[p][..].
template <class T, int N, int D>
inline void add_values(const T (*weights)[kChunk], const T* const* cells, int count, int head_dim, float* sums, size_t stride) {
    constexpr int step = Dot<T>::kStep;
    Vec acc[N][D];
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) acc[n][d] = load(sums + n * stride + d * kLanes);
    for (int c = 0; c < count; c++)
        for (int p = 0; p < kCell; p += step)
            for (int n = 0; n < N; n++) {
                auto weight = Dot<T>::broadcast(weights[n] + c * kCell + p);
                const T* row = cells[c] + size_t(p) * head_dim;
                for (int d = 0; d < D; d++) acc[n][d] = Dot<T>::add(acc[n][d], row + d * kLanes * step, weight);
            }
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) store(sums + n * stride + d * kLanes, acc[n][d]);
}

constexpr int kMaxHeadDim = 512;

// N queries of one sequence and one key/value head.
template <class T, int N>
void attend(const Query<T>* queries, const Cache<T>& cache, int layer, int head, const int64_t* table, int head_dim, float scale) {
    constexpr int step = Dot<T>::kStep;
    const float lowest = -std::numeric_limits<float>::infinity();
    alignas(64) float scores[N][kChunk];
    alignas(64) T weights[N][kChunk];
    alignas(64) float sums[N][kMaxHeadDim];
    float most[N], total[N];
    int last = 0;
    for (int n = 0; n < N; n++) {
        last = std::max(last, queries[n].last);
        most[n] = lowest;
        total[n] = 0;
        std::memset(sums[n], 0, head_dim * sizeof(float));
    }
    for (int begin = 0; begin <= last; begin += kChunk) {
        const int count = std::min(kCells, (last - begin) / kCell + 1);
        const T *keys[kCells], *values[kCells];
        for (int c = 0; c < count; c++) {
            keys[c] = cache.keys(layer, head, table, begin + c * kCell);
            values[c] = cache.values(layer, head, table, begin + c * kCell);
            for (int line = 0; line < int(kCell * head_dim * sizeof(T)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(values[c]) + line);
        }
        if (count == kCells)
            score<T, N, kCells>(queries, keys, head_dim, scale, scores);
        else
            for (int c = 0; c < count; c++)
                score<T, N, 1>(queries, keys + c, head_dim, scale, reinterpret_cast<float(*)[kChunk]>(&scores[0][c * kCell]));
        if (begin + kChunk <= last)  // the next chunk's keys, while this one's weights are computed
            for (int c = 0; c < std::min(kCells, (last - begin - kChunk) / kCell + 1); c++) {
                auto next = reinterpret_cast<const char*>(cache.keys(layer, head, table, begin + kChunk + c * kCell));
                for (int line = 0; line < int(kCell * head_dim * sizeof(T)); line += 64) __builtin_prefetch(next + line);
            }
        for (int n = 0; n < N; n++) {
            const int seen = queries[n].last - begin + 1;  // positions of this chunk that the query sees
            Vec chunk_most = splat(lowest);
            for (int c = 0; c < count; c++) {
                float* s = scores[n] + c * kCell;
                if (seen < (c + 1) * kCell)
                    for (int lane = std::max(0, seen - c * kCell); lane < kCell; lane++) s[lane] = lowest;
                chunk_most = max(chunk_most, load(s));
            }
            const float now_most = std::max(most[n], max(chunk_most));
            Vec chunk_total = Vec{};
            for (int c = 0; c < count; c++) {
                Vec weight = exp(load(scores[n] + c * kCell) - splat(now_most));
                store(weights[n] + c * kCell, weight);
                chunk_total += weight;
            }
            const float shrink = exp(splat(most[n] - now_most))[0];
            total[n] = total[n] * shrink + sum(chunk_total);
            most[n] = now_most;
            if (shrink != 1.0f)
                for (int d = 0; d < head_dim; d += kLanes) store(sums[n] + d, load(sums[n] + d) * splat(shrink));
        }
        int d = 0;
        for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
            const T* at[kCells];
            for (int c = 0; c < count; c++) at[c] = values[c] + d * step;
            add_values<T, N, 4>(weights, at, count, head_dim, sums[0] + d, kMaxHeadDim);
        }
        for (; d < head_dim; d += kLanes) {
            const T* at[kCells];
            for (int c = 0; c < count; c++) at[c] = values[c] + d * step;
            add_values<T, N, 1>(weights, at, count, head_dim, sums[0] + d, kMaxHeadDim);
        }
    }
    for (int n = 0; n < N; n++)
        for (int d = 0; d < head_dim; d += kLanes) store(queries[n].out + d, load(sums[n] + d) * splat(1.0f / total[n]));
}

}  // namespace kernels
}  // namespace llama
