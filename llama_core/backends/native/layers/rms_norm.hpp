// RMSNorm: x / sqrt(mean(x^2) + eps) * (offset + weights).
#pragma once

#include "../base/simd.hpp"

namespace llama {

// The sum of the squares of x [width], which ends with zeros up to a whole vector.
template <class T>
inline float sum_of_squares(const T* x, int width) {
    Vec squares = Vec{};
    for (int i = 0; i < width; i += kLanes) {
        Vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    return sum(squares);
}

template <class T>
struct RmsNorm {
    const T* weights = nullptr;  // null: no factors
    float eps = 0, offset = 0;   // eps 0: no norm

    float inverse(float squares, int width) const { return 1.0f / std::sqrt(squares / width + eps); }

    // x, weights, to: [width], rounded up to whole vectors that are zeros beyond the width. `to` may be `x`.
    void scale(const T* x, int width, float inverse, T* to) const {
        const Vec by = splat(inverse), more = splat(offset);
        for (int i = 0; i < width; i += kLanes) {
            const Vec normed = round_to<T>(load(x + i) * by);
            store(to + i, weights ? normed * (load(weights + i) + more) : normed);
        }
    }
    void operator()(const T* x, int width, T* to) const { scale(x, width, inverse(sum_of_squares(x, width), width), to); }
};

}  // namespace llama
