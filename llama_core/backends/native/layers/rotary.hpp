// Rotary embedding of adjacent pairs.
#pragma once

#include "../base/simd.hpp"
#include "../step_abi.hpp"

namespace llama {

class Rotary {
  public:
    // `table`: float [max_seq_len][head_dim / 2][2], cos and sin. `head_dim`: padded to whole vectors.
    Rotary(const Shape& shape, int head_dim, const float* table)
        : head_dim_(head_dim), memory_(size_t(shape.max_seq_len) * 2 * head_dim * 4) {
        for (int p = 0; p < shape.max_seq_len; p++) {
            float* to = of(p);
            for (int i = 0; i < shape.head_dim; i++) {
                const float* pair = table + (size_t(p) * (shape.head_dim / 2) + i / 2) * 2;
                to[i] = pair[0];
                to[head_dim_ + i] = i % 2 ? pair[1] : -pair[1];
            }
        }
    }

    size_t bytes() const { return memory_.bytes(); }

    template <class T>
    void rotate_head(const T* x, int position, T* to) const {
        const float* rotary = of(position);
        for (int i = 0; i < head_dim_; i += kLanes) {
            Vec v = load(x + i);
            Vec other = swap_neighbours(v);
            store(to + i, fma(v, load(rotary + i), other * load(rotary + head_dim_ + i)));
        }
    }

  private:
    float* of(int position) const { return memory_.as<float>() + size_t(position) * 2 * head_dim_; }

    int head_dim_;
    // For each position: the cosine of every angle, written twice, then the sines, negated at even indices.
    // float [max_seq_len][2][head_dim]
    Memory memory_;
};

}  // namespace llama
