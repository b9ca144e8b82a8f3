// Attention over the paged cache, read in place: one pass over the keys and values with a running softmax.
//
// After "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018) and FlashAttention (Dao et al. 2022). Keys
// are taken in chunks that begin at multiples of 64 positions for every query, so a query's result does not depend on whether
// it was computed alone (decode) or among others (prefill), nor on the chunks of its prompt.
//
// Cache of one layer: [block][kv head][block_size / 16] KV tiles of 16 positions, keys and then values, so that memory is read
// in pieces of some kilobytes. A lane is a position for keys and a dimension for values. In a KV tile, with `step` = 1
// (float32) or 2 (bfloat16) elements multiplied at once:
//   keys   [head_dim / step][16 positions][step]
//   values [16 / step][head_dim][step]
#pragma once

#include <algorithm>
#include <limits>

#include "linear.hpp"

namespace llama {

constexpr int kKvTile = 16;  // positions
constexpr int kChunk = 64;   // positions whose scores are known before any value is read
constexpr int kChunkTiles = kChunk / kKvTile;

// Keys and values of all layers. head_dim is padded to whole vectors.
template <class T>
class Cache {
  public:
    Cache() = default;
    Cache(int layers, int blocks, int block_size, int kv_heads, int head_dim)
        : block_size_(block_size), head_dim_(head_dim), kv_tile_(size_t(kKvTile) * head_dim) {
        head_ = 2 * kv_tile_ * (block_size / kKvTile);
        block_ = head_ * kv_heads;
        layer_ = block_ * blocks;
        memory_ = Memory(layer_ * layers * sizeof(T));
    }

    T* keys(int layer, int head, const int64_t* block_table, int position) const {
        return memory_.as<T>() + layer * layer_ + block_table[position / block_size_] * block_ + head * head_ +
               position % block_size_ / kKvTile * 2 * kv_tile_;
    }
    T* values(int layer, int head, const int64_t* block_table, int position) const {
        return keys(layer, head, block_table, position) + kv_tile_;
    }

    void write(int layer, int head, const int64_t* block_table, int position, const T* key, const T* value) const {
        constexpr int step = Dot<T>::kStep;
        const int lane = position % kKvTile;
        T* k = keys(layer, head, block_table, position) + lane * step;
        T* v = values(layer, head, block_table, position);
        for (int d = 0; d < head_dim_; d += step)
            for (int i = 0; i < step; i++) k[d * kKvTile + i] = key[d + i];
        v += size_t(lane / step) * head_dim_ * step + lane % step;
        for (int d = 0; d < head_dim_; d++) v[d * step] = value[d];
    }

    // Zeroes the values behind `position` in its KV tile: another sequence may have left NaN there, and zero times NaN is NaN.
    void clear_behind(int layer, int head, const int64_t* block_table, int position) const {
        constexpr int step = Dot<T>::kStep;
        T* v = values(layer, head, block_table, position);
        for (int lane = position % kKvTile + 1; lane < kKvTile; lane++)
            for (int d = 0; d < head_dim_; d++) v[(size_t(lane / step) * head_dim_ + d) * step + lane % step] = T{};
    }

  private:
    int block_size_ = 0, head_dim_ = 0;
    size_t kv_tile_ = 0, head_ = 0, block_ = 0, layer_ = 0;
    Memory memory_;
};

// One query: q [head_dim] rotated, sees positions 0 .. last of its sequence; out [head_dim].
template <class T>
struct Query {
    const T* q;
    T* out;
    int last;
};

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

constexpr int kMaxHeadDim = 512;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The running softmax of one query: the greatest score so far, and the sum of e^(score - greatest).
struct Running {
    float most = kLowest, total = 0;

    // Takes the products of `count` KV tiles that begin at position `begin`; the query sees positions up to `last`. Writes the
    // tiles' weights, and returns the factor by which the sums before must be multiplied.
    template <class T>
    float take(const float* products, float scale, T* weights, int count, int begin, int last) {
        const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Vec scores[kChunkTiles], highest = splat(kLowest), sums = Vec{};
        for (int c = 0; c < count; c++) {
            const int seen = last - begin - c * kKvTile;  // the last lane that the query sees
            scores[c] = lanes <= seen ? load(products + c * kKvTile) * splat(scale) : splat(kLowest);
            highest = max(highest, scores[c]);
        }
        const float now = std::max(most, max(highest));
        for (int c = 0; c < count; c++) {
            Vec weight = exp(scores[c] - splat(now));
            store(weights + c * kKvTile, weight);
            sums += weight;
        }
        const float shrink = most == now ? 1.0f : exp(splat(most - now))[0];
        total = total * shrink + sum(sums);
        most = now;
        return shrink;
    }
};

// What a call of `attend` reads: one sequence's keys and values under one head. `next_head`: the head that is read next, or -1.
struct Source {
    int layer, head, next_head;
    const int64_t* block_table;
};

// The addresses of a chunk's KV tiles. Its values, and the keys of the next chunk, are prefetched.
template <class T>
struct Chunk {
    int count;
    const T *keys[kChunkTiles], *values[kChunkTiles];

    Chunk(const Cache<T>& cache, const Source& from, int head_dim, int begin, int last) : count(kv_tiles(begin, last)) {
        for (int c = 0; c < count; c++) {
            keys[c] = cache.keys(from.layer, from.head, from.block_table, begin + c * kKvTile);
            values[c] = cache.values(from.layer, from.head, from.block_table, begin + c * kKvTile);
            prefetch_tile(values[c], head_dim);
        }
        const bool more = begin + kChunk <= last;
        const int next_head = more ? from.head : from.next_head, next = more ? begin + kChunk : 0;
        if (next_head < 0) return;
        for (int c = 0; c < kv_tiles(next, last); c++)
            prefetch_tile(cache.keys(from.layer, next_head, from.block_table, next + c * kKvTile), head_dim);
    }

  private:
    static int kv_tiles(int begin, int last) { return begin > last ? 0 : std::min(kChunkTiles, (last - begin) / kKvTile + 1); }
    static void prefetch_tile(const T* kv_tile, int head_dim) {
        const char* p = reinterpret_cast<const char*>(kv_tile);
        for (int line = 0; line < int(kKvTile * head_dim * sizeof(T)); line += 64) __builtin_prefetch(p + line);
    }
};

// N queries of one sequence and one key/value head.
template <class T, int N>
void attend(const Query<T>* queries, const Cache<T>& cache, const Source& from, int head_dim, float scale) {
    constexpr int step = Dot<T>::kStep;
    alignas(64) float products[N][kChunk];
    alignas(64) T weights[N][kChunk];
    alignas(64) float sums[N][kMaxHeadDim];
    Running running[N];
    int last = 0;
    for (int n = 0; n < N; n++) {
        last = std::max(last, queries[n].last);
        std::memset(sums[n], 0, head_dim * sizeof(float));
    }
    for (int begin = 0; begin <= last; begin += kChunk) {
        const Chunk<T> chunk(cache, from, head_dim, begin, last);
        if (chunk.count == kChunkTiles)
            multiply_keys<T, N, kChunkTiles>(queries, chunk.keys, head_dim, products);
        else
            for (int c = 0; c < chunk.count; c++)
                multiply_keys<T, N, 1>(queries, chunk.keys + c, head_dim, reinterpret_cast<float(*)[kChunk]>(&products[0][c * kKvTile]));
        for (int n = 0; n < N; n++) {
            const float shrink = running[n].take(products[n], scale, weights[n], chunk.count, begin, queries[n].last);
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

#if defined(LLAMA_AMX)
constexpr int kTileQueries = 16;

// Sets the shapes of the tile registers for `attend_tiles` with up to so many queries, and restores them at its end.
struct AttentionTiles {
    explicit AttentionTiles(int num_queries) {
        TileShapes shapes;
        const auto rows = uint8_t(std::min(num_queries, kTileQueries));
        for (int tile : {0, 1, 2, 3, 4, 6}) shapes.rows[tile] = rows;  // sums, queries, weights
        shapes.row_bytes[6] = kKvTile * 2, shapes.rows[7] = kKvTile / 2;   // weights, values: 8 pairs of positions
        shapes.use();
    }
    ~AttentionTiles() { use_tiles(); }
};

// The weights, shrink factors and values of a chunk. They are used after the next chunk's products: a tile load would wait for
// stores that have not reached the cache.
struct Weighted {
    alignas(64) bf16 weights[kTileQueries][kChunk];
    float shrinks[kTileQueries];
    const bf16* values[kChunkTiles];
    int count = 0;
};

// sums [n][head_dim] = sums * shrinks[n] + the chunk's values by their weights.
inline void add_values_tiles(const Weighted& chunk, int num, int head_dim, float* sums) {
    alignas(64) float part[kTileQueries][kChunk];
    const size_t stride = size_t(head_dim) * 4;
    asm volatile("" ::"r"(&chunk) : "memory");
    for (int d = 0; d < head_dim; d += 4 * kLanes) {
        const bool whole = d + 4 * kLanes <= head_dim;  // else half: two tiles
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < chunk.count; c++) {
            const bf16* values = chunk.values[c] + d * 2;
            _tile_loadd(6, &chunk.weights[0][c * kKvTile], sizeof chunk.weights[0]);
            _tile_loadd(7, values, stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, values + 32, stride);
            _tile_dpbf16ps(1, 6, 7);
            if (!whole) continue;
            _tile_loadd(7, values + 64, stride);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, values + 96, stride);
            _tile_dpbf16ps(3, 6, 7);
        }
        _tile_stored(0, &part[0][0], sizeof part[0]);
        _tile_stored(1, &part[0][16], sizeof part[0]);
        _tile_stored(2, &part[0][32], sizeof part[0]);
        _tile_stored(3, &part[0][48], sizeof part[0]);
        for (int n = 0; n < num; n++)
            for (int t = 0; t < (whole ? 4 : 2); t++) {
                float* sum = sums + n * head_dim + d + t * kLanes;
                store(sum, fma(load(sum), splat(chunk.shrinks[n]), load(part[n] + t * kLanes)));
            }
    }
}

// `attend` on register tiles; head_dim divides by 32. A KV tile of keys is head_dim / 32 register tiles, one of values
// head_dim / 16 half ones.
inline void attend_tiles(const Query<bf16>* queries, int num, const Cache<bf16>& cache, const Source& from, int head_dim, float scale) {
    // Packed: rows at the stride of the largest head would share few sets of the first-level cache.
    alignas(64) bf16 q[kTileQueries * kMaxHeadDim];
    alignas(64) float products[kTileQueries][kChunk];
    alignas(64) float sums[kTileQueries * kMaxHeadDim];
    Weighted weighted[2];
    Running running[kTileQueries];
    int last = 0;
    for (int n = 0; n < num; n++) {
        last = std::max(last, queries[n].last);
        std::memcpy(static_cast<void*>(q + n * head_dim), queries[n].q, head_dim * sizeof(bf16));
    }
    std::memset(sums, 0, num * head_dim * sizeof(float));
    // Rows beyond `num` are computed and never read. The barrier is for the compiler: a tile load does not declare its reads.
    asm volatile("" ::"r"(q) : "memory");
    int turn = 0;
    for (int begin = 0; begin <= last; begin += kChunk, turn ^= 1) {
        const Chunk<bf16> chunk(cache, from, head_dim, begin, last);
        const int count = chunk.count;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < head_dim; d += 32) {
            _tile_loadd(4, q + d, head_dim * sizeof(bf16));
            _tile_loadd(5, chunk.keys[0] + d * kKvTile, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (count == 1) continue;
            _tile_loadd(5, chunk.keys[1] + d * kKvTile, 64);
            _tile_dpbf16ps(1, 4, 5);
            if (count == 2) continue;
            _tile_loadd(5, chunk.keys[2] + d * kKvTile, 64);
            _tile_dpbf16ps(2, 4, 5);
            if (count == 3) continue;
            _tile_loadd(5, chunk.keys[3] + d * kKvTile, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, &products[0][0], sizeof products[0]);
        _tile_stored(1, &products[0][16], sizeof products[0]);
        _tile_stored(2, &products[0][32], sizeof products[0]);
        _tile_stored(3, &products[0][48], sizeof products[0]);
        if (begin) add_values_tiles(weighted[turn ^ 1], num, head_dim, sums);
        Weighted& now = weighted[turn];
        now.count = count;
        std::copy_n(chunk.values, count, now.values);
        for (int n = 0; n < num; n++)
            now.shrinks[n] = running[n].take(products[n], scale, now.weights[n], count, begin, queries[n].last);
    }
    add_values_tiles(weighted[turn ^ 1], num, head_dim, sums);
    for (int n = 0; n < num; n++)
        for (int d = 0; d < head_dim; d += kLanes) store(queries[n].out + d, load(sums + n * head_dim + d) * splat(1.0f / running[n].total));
}
#else
struct AttentionTiles {
    explicit AttentionTiles(int) {}
};
#endif

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
