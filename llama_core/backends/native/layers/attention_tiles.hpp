// Attention on the tile registers of AMX, for bfloat16.
#pragma once

#include "../base/amx_tiles.hpp"
#include "softmax_chunks.hpp"

namespace llama {
namespace kernels {

#if defined(LLAMA_AMX)
constexpr int kTileQueries = 16;

// Sets the shapes of the tile registers for `attend_tiles` with up to so many queries, and restores them at its end.
struct AttentionTiles {
    explicit AttentionTiles(int num_queries) {
        TileShapes shapes;
        const auto rows = uint8_t(std::min(num_queries, kTileQueries));
        for (int tile : {0, 1, 2, 3, 4, 6}) shapes.rows[tile] = rows;     // sums, queries, weights
        shapes.row_bytes[6] = kKvTile * 2, shapes.rows[7] = kKvTile / 2;  // weights, values: 8 pairs of positions
        shapes.use();
    }
    ~AttentionTiles() { use_tiles(); }
};

// The weights, shrink factors and values of a chunk for up to kTileQueries queries. They are used after the products of the next
// group or chunk: a tile load right after the stores would wait until these reach the cache.
struct WeightedChunk {
    alignas(64) bf16 weights[kTileQueries][kChunk];
    float shrinks[kTileQueries];
    const bf16* values[kChunkTiles];
    int count, num = 0;
    float* sums;
};

// sums [n][head_dim] = sums * shrinks[n] + the chunk's values by their weights.
inline void add_values_tiles(const WeightedChunk& chunk, int head_dim) {
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
        for (int n = 0; n < chunk.num; n++)
            for (int t = 0; t < (whole ? 4 : 2); t++) {
                float* sum = chunk.sums + n * head_dim + d + t * kLanes;
                store(sum, fma(load(sum), splat(chunk.shrinks[n]), load(part[n] + t * kLanes)));
            }
    }
}

// Queries of `attend_by` on register tiles; head_dim divides by 32. A KV tile of keys is head_dim / 32 register tiles, one of
// values head_dim / 16 half ones. Nothing reads the products and sums of rows beyond a group's queries.
class TileQueries {
  public:
    static constexpr int kGroup = kTileQueries;

    // Rows are packed: at the stride of the largest head they would share few sets of the first-level cache.
    TileQueries(const Query<bf16>* queries, int num, int head_dim) : queries_(queries), head_dim_(head_dim) {
        for (int n = 0; n < num; n++) std::memcpy(static_cast<void*>(q_ + n * head_dim), queries[n].q, head_dim * sizeof(bf16));
        // The barrier tells the compiler about the reads of tile loads, which do not declare them.
        asm volatile("" ::"r"(q_) : "memory");
    }

    void add(int first, int num, const Chunk<bf16>& chunk, float scale, RunningSoftmax* running, float* sums) {
        alignas(64) float products[kTileQueries][kChunk];
        multiply(q_ + first * head_dim_, chunk, products);
        if (weighted_[turn_ ^ 1].num) add_values_tiles(weighted_[turn_ ^ 1], head_dim_);
        WeightedChunk& now = weighted_[turn_];
        now.count = chunk.count, now.num = num, now.sums = sums + first * head_dim_;
        std::copy_n(chunk.values, chunk.count, now.values);
        for (int n = 0; n < num; n++) {
            const Query<bf16>& query = queries_[first + n];
            now.shrinks[n] =
                running[first + n].add(products[n], scale, now.weights[n], chunk.count, chunk.begin, query.first, query.last);
        }
        turn_ ^= 1;
    }
    void finish() { add_values_tiles(weighted_[turn_ ^ 1], head_dim_); }

  private:
    void multiply(const bf16* q, const Chunk<bf16>& chunk, float (*products)[kChunk]) const {
        const int count = chunk.count;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < head_dim_; d += 32) {
            _tile_loadd(4, q + d, head_dim_ * sizeof(bf16));
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
    }

    const Query<bf16>* queries_;
    const int head_dim_;
    alignas(64) bf16 q_[kMostQueries * kMaxHeadDim];
    WeightedChunk weighted_[2];
    int turn_ = 0;
};
#else
struct AttentionTiles {
    explicit AttentionTiles(int) {}
};
#endif

}  // namespace kernels
}  // namespace llama
