// Activations as integers, for weight formats that multiply integers.
#pragma once

#include "memory.hpp"
#include "simd.hpp"

namespace llama {

typedef uint8_t BVec __attribute__((vector_size(16)));

// Activations as 16-bit integers in two bytes: x = scale * (256 * (high - 128) + low).
struct Quantized {
    Activations<uint8_t> high, low;
    Memory scales;  // float [rows]
    Quantized() = default;
    Quantized(size_t rows, size_t width) : high(rows, width), low(rows, width), scales(round_up(rows, kMaxRows) * 4) {}
    float* scale() const { return scales.as<float>(); }
    size_t bytes() const { return high.bytes() + low.bytes() + scales.bytes(); }

    template <class T>
    void quantize(const T* x, size_t row, int width) {
        Vec most = Vec{}, check = Vec{};
        for (int i = 0; i < width; i += kLanes) {
            Vec v = load(x + i);
            most = max(most, v < Vec{} ? -v : v);
            check += v * splat(0.0f);  // NaN for infinity and for NaN, which integers cannot hold
        }
        float limit = max(most);
        float inverse = limit > 0 ? 32767.0f / limit : 0.0f;
        scale()[row] = limit / 32767.0f + sum(check);
        const Vec magic = splat(12582912.0f);
        for (int i = 0; i < width; i += kLanes) {
            IVec q = (IVec)(fma(load(x + i), splat(inverse), magic)) - (IVec)magic + 32768;
            BVec h = __builtin_convertvector(q >> 8, BVec), l = __builtin_convertvector(q, BVec);
            std::memcpy(high[row] + i, &h, sizeof h);
            std::memcpy(low[row] + i, &l, sizeof l);
        }
    }
};

}  // namespace llama
