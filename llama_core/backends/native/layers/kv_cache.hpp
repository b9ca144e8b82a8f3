// The KV cache of a rank: keys and values of all layers, in blocks of positions.
//
// Of one layer: [block][kv head][block_size / 16] KV tiles of 16 positions, keys and then values, so that memory is read in
// pieces of some kilobytes. A lane is a position for keys and a dimension for values. In a KV tile, with `step` = 1 (float32)
// or 2 (bfloat16) elements multiplied at once:
//   keys   [head_dim / step][16 positions][step]
//   values [16 / step][head_dim][step]
#pragma once

#include "../base/memory.hpp"
#include "../base/simd.hpp"

namespace llama {

constexpr int kKvTile = 16;        // positions
constexpr int kMostQueries = 128;  // that read keys and values of the cache together

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

    // Zeroes the values after `position` in its KV tile: another sequence may have left NaN there, and zero times NaN is NaN.
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

}  // namespace llama
