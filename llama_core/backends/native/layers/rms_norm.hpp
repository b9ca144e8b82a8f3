// RMSNorm: x / sqrt(mean(x^2) + eps) * weight.
#pragma once

#include "../base/simd.hpp"

namespace llama {

// x, weight, to: [width], rounded up to whole vectors that are zeros beyond the width. `to` may be `x`.
template <class T>
inline void rms_norm(const T* x, const T* weight, int width, float eps, T* to) {
    Vec squares = Vec{};
    for (int i = 0; i < width; i += kLanes) {
        Vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    const Vec inverse = splat(1.0f / std::sqrt(sum(squares) / width + eps));
    for (int i = 0; i < width; i += kLanes) store(to + i, round_to<T>(load(x + i) * inverse) * load(weight + i));
}

}  // namespace llama
