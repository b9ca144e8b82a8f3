// Activations as integers, for weight formats that multiply integers.
#pragma once

#include "memory.hpp"
#include "simd.hpp"

namespace llama {

typedef uint8_t BVec __attribute__((vector_size(16)));
typedef int8_t SBVec __attribute__((vector_size(16)));

// What a weight format multiplies: the activations themselves, or one of two forms of integers.
enum class InputForm { kDense, kRows, kGroups };

constexpr int kGroupInputs = 32;  // inputs that share a scale in the formats of groups

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

// Activations as 8-bit integers with one scale for each group of inputs: x = scale * code, codes from -127 to 127.
struct GroupQuantized {
    Activations<int8_t> codes;
    Activations<float> scales;
    Activations<int32_t> sums;       // of the codes of a group
    Activations<float> scaled_sums;  // scale * sum
    GroupQuantized() = default;
    GroupQuantized(size_t rows, size_t width)
        : codes(rows, width), scales(rows, groups(width)), sums(rows, groups(width)), scaled_sums(rows, groups(width)) {}
    size_t bytes() const { return codes.bytes() + scales.bytes() + sums.bytes() + scaled_sums.bytes(); }

    // `width`: a multiple of 16.
    template <class T>
    void quantize(const T* x, size_t row, int width) {
        for (int at = 0, group = 0; at < width; at += kGroupInputs, group++) {
            const bool whole = at + kLanes < width;
            const Vec low = load(x + at), high = whole ? load(x + at + kLanes) : Vec{};
            const UVec a = (UVec)low & 0x7fffffff, b = (UVec)high & 0x7fffffff;
            // Absolute values compare as their bits do, and NaN and infinity are above all others.
            const uint32_t most = fold((UVec)(a > b ? a : b), [](UVec p, UVec q) { return (UVec)(p > q ? p : q); });
            float limit;
            std::memcpy(&limit, &most, 4);
            const bool finite = most < 0x7f800000;
            const float inverse = finite && limit > 1e-35f ? 127.0f / limit : 0.0f;
            const IVec p = rounded(low, inverse), q = rounded(high, inverse);
            put(codes[row] + at, p);
            if (whole) put(codes[row] + at + kLanes, q);
            const int32_t sum = fold(p + q, [](IVec u, IVec v) { return u + v; });
            const float scale = finite ? limit / 127.0f : NAN;
            scales[row][group] = scale;
            sums[row][group] = sum;
            scaled_sums[row][group] = scale * float(sum);
        }
    }

  private:
    static size_t groups(size_t width) { return (width + kGroupInputs - 1) / kGroupInputs; }

    static IVec rounded(Vec v, float inverse) {
        const Vec magic = splat(12582912.0f);
        return inverse > 0 ? (IVec)fma(v, splat(inverse), magic) - (IVec)magic : IVec{};
    }

    static void put(int8_t* to, IVec v) {
        const SBVec narrow = __builtin_convertvector(v, SBVec);
        std::memcpy(to, &narrow, sizeof narrow);
    }
};

}  // namespace llama
